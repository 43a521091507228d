"""What all pages share: frame, components, colours, sentences, callbacks, and who looks."""

"""Reports in the terminal and as documents."""

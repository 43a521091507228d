"""A graph replayed: clocks set right, what each op costs by itself, its ideal, and the kernel that runs them."""

"""tracekit: what slows a large training job down, who causes it, and what each fix would buy."""

"""Why a job is slow, what each fix would save, and whether to believe it."""

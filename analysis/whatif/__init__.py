"""What-if questions: selections of ops, scenarios that change their costs, and the resulting timelines."""

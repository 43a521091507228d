"""A trace as a dependency graph: lanes, the rules that join their ops, templates, and views by stage and worker."""

"""A trace as a dependency graph: lanes, the rules that connect their ops, templates, and views by stage and worker."""

"""Some steps of a run that were profiled: what they cost by module, operator and line, and one trace of all ranks."""

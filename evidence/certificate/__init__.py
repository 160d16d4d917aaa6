"""A run that is killed repeatedly, compared with an uninterrupted one."""

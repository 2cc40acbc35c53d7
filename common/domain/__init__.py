"""The rules of a job, without any I/O: states, parameters, profiles, tickets, errors."""

"""Postgres, the only truth about a job: tables, statements, connections."""

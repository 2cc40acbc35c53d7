"""The process that owns one GPU: it claims jobs, has them rendered by an engine child, and delivers the videos."""

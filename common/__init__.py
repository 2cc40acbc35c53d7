"""What api, dispatcher and worker share: the job's rules, its tables, the broker, storage and settings."""

"""The HTTP and WebSocket face: takes jobs, answers what became of them. Read app.py first."""

"""RabbitMQ, which carries tickets. Anything may be lost here; Postgres knows better."""

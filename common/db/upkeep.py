"""Statements of the control loop and the workers about themselves: leadership, windows, presence, keys."""

from sqlalchemy import text

# Become or stay the leader. A stopped process loses a lease row, unlike an advisory lock held by its connection.
LEAD = text("""
INSERT INTO leaders AS l (role, holder, expires_at) VALUES (:role, :holder, now() + :lease_s * interval '1 second')
ON CONFLICT (role) DO UPDATE SET holder = :holder, expires_at = now() + :lease_s * interval '1 second'
WHERE l.holder = :holder OR l.expires_at < now()
RETURNING l.holder
""")

STEP_DOWN = text("UPDATE leaders SET expires_at = now() WHERE role = :role AND holder = :holder")

# Note a scan of the leases. When the last one by any leader is too old (an outage, a suspended machine), the workers
# could not renew their leases either: nothing expires until they have had one lease time to do so.
NOTE_SCAN = text("""
UPDATE leaders SET last_scan_at = now(),
    expire_nothing_before = CASE WHEN last_scan_at < now() - :gap_s * interval '1 second'
        THEN now() + :lease_s * interval '1 second' ELSE expire_nothing_before END
WHERE role = :role RETURNING expire_nothing_before > now() AS warming_up
""")

SET_WINDOW = text("""
INSERT INTO release_windows AS w (model, size, jobs_per_s, updated_at) VALUES (:model, :size, :jobs_per_s, now())
ON CONFLICT (model) DO UPDATE SET size = :size, jobs_per_s = :jobs_per_s, updated_at = now()
""")

WORKER_PRESENT = text("""
INSERT INTO workers AS w (id, model, engine, max_batch, accepting) VALUES (:id, :model, :engine, :max_batch, :accepting)
ON CONFLICT (id) DO UPDATE SET model = :model, engine = :engine, max_batch = :max_batch, accepting = :accepting,
    heartbeat_at = now()
""")

WORKER_GONE = text("DELETE FROM workers WHERE id = :id")

FORGET_WORKERS = text("DELETE FROM workers WHERE heartbeat_at < now() - interval '1 day'")

ADD_TENANT = text("""
INSERT INTO tenants (id, name) VALUES (CAST(:id AS uuid), :name)
ON CONFLICT (name) DO UPDATE SET name = excluded.name RETURNING id
""")

ADD_KEY = text("""
INSERT INTO api_keys (id, tenant_id, name, sha256, scopes)
VALUES (CAST(:id AS uuid), CAST(:tenant_id AS uuid), :name, :sha256, CAST(:scopes AS text[])) RETURNING id
""")

REVOKE_KEY = text("""
UPDATE api_keys SET revoked_at = now() WHERE id = CAST(:id AS uuid) AND revoked_at IS NULL RETURNING id
""")

LIST_KEYS = text("""
SELECT k.id, t.name AS tenant, k.name, k.scopes,
    k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > now()) AS works
FROM api_keys k JOIN tenants t ON t.id = k.tenant_id ORDER BY k.created_at
""")

"""Programs that run inside a container of the stack, where its credentials are. Each prints JSON."""

# 100 keys in one go: each start of a container takes seconds.
MAKE_KEYS = """
import json
from api.auth import SCOPES, key_digest, new_key
from common.db.sessions import sync_engine
from common.db.upkeep import ADD_KEY, ADD_TENANT
from common.domain.ids import new_id
from common.settings import DatabaseSettings, read

def make(connection, tenant):
    key = new_key()
    tenant_id = connection.execute(ADD_TENANT, {"id": str(new_id()), "name": tenant}).scalar_one()
    values = {"id": str(new_id()), "tenant_id": str(tenant_id), "name": "burst", "sha256": key_digest(key)}
    connection.execute(ADD_KEY, values | {"scopes": list(SCOPES[:2])})
    return key

with sync_engine(read(DatabaseSettings), 1).connect() as connection:
    print(json.dumps([make(connection, f"burst-{number}") for number in range(100)]))
"""

# The keys of all videos in the bucket.
LIST_VIDEOS = """
import json
from common.settings import StorageSettings, read
from common.storage import VIDEO_PREFIX, client

settings = read(StorageSettings)
pages = client(settings).get_paginator("list_objects_v2").paginate(Bucket=settings.s3_bucket, Prefix=VIDEO_PREFIX)
print(json.dumps([item["Key"] for page in pages for item in page.get("Contents", ())]))
"""

# This process's metrics, of those that an api exports, by name and labels.
READ_METRICS = """
import json
import urllib.request

page = urllib.request.urlopen("http://127.0.0.1:9090/metrics", timeout=5).read().decode()
pairs = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
print(json.dumps({name: float(value) for name, value in pairs}))
"""

-- One table for everything that belongs to a shard. row_type: 1 the shard's ownership row, 2 a timer,
-- 3 a reached timer. Times are milliseconds since 1970 in UTC; a shard row has -1, 0, 0 in the key.
CREATE TABLE timers (
    shard_id                       INTEGER NOT NULL,
    row_type                       INTEGER NOT NULL CHECK (row_type IN (1, 2, 3)),
    timer_execute_at               INTEGER NOT NULL,  -- of a reached timer: when it may be purged
    timer_uuid_high                INTEGER NOT NULL,  -- of a reached timer: of that occurrence
    timer_uuid_low                 INTEGER NOT NULL,
    row_format                     INTEGER NOT NULL,

    timer_namespace                TEXT,
    timer_id                       TEXT,
    timer_generation               INTEGER,
    timer_scheduled_at             INTEGER,
    timer_created_at               INTEGER,
    timer_attempts                 INTEGER,
    timer_callback_url             TEXT,
    timer_payload                  TEXT,
    timer_retry_policy             TEXT,
    timer_callback_timeout_seconds INTEGER,
    timer_correlation_id           TEXT,
    timer_options                  TEXT,

    timer_outcome                  TEXT,
    timer_reached_at               INTEGER,
    timer_own_execute_at           INTEGER,  -- the key of a reached row is not its timer's: these are
    timer_own_uuid_high            INTEGER,
    timer_own_uuid_low             INTEGER,

    shard_version                  INTEGER,
    shard_nonce                    INTEGER,
    shard_owner_id                 TEXT,
    shard_owner_address            TEXT,
    shard_claimed_at               INTEGER,
    shard_low_water                TEXT,

    PRIMARY KEY (shard_id, row_type, timer_execute_at, timer_uuid_high, timer_uuid_low)
) STRICT, WITHOUT ROWID;

CREATE INDEX shard_rows ON timers (shard_id) WHERE row_type = 1;
-- A timer is stored once; what became of it may be stored many times, newest last.
CREATE UNIQUE INDEX timers_by_id ON timers (shard_id, timer_namespace, timer_id) WHERE row_type = 2;
CREATE INDEX reached_by_id ON timers (shard_id, timer_namespace, timer_id, timer_generation, timer_reached_at)
    WHERE row_type = 3;
-- In list order, so that a trace is one range scan. Costs nothing for timers without a correlation id.
CREATE INDEX timers_by_correlation ON timers
    (timer_correlation_id, timer_namespace, row_type, timer_execute_at, timer_uuid_high, timer_uuid_low)
    WHERE timer_correlation_id IS NOT NULL;

CREATE TABLE members (
    instance_id TEXT PRIMARY KEY,
    address     TEXT NOT NULL,
    counter     INTEGER NOT NULL,
    alive       INTEGER NOT NULL,
    joined_at   INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE namespaces (
    name       TEXT PRIMARY KEY,
    num_shards INTEGER NOT NULL,
    revision   INTEGER NOT NULL,
    body       TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- For people and reports: one row per timer, as it stands or as it last ended. A cancelled timer has none:
-- its due time was not reached.
CREATE VIEW timer_schedules (tenant_id, service_call_id, correlation_id, due_at, registered_at, reached_at, state) AS
SELECT
    timer_namespace, timer_id, timer_correlation_id,
    strftime('%Y-%m-%dT%H:%M:%S', timer_scheduled_at / 1000, 'unixepoch') || printf('.%03dZ', timer_scheduled_at % 1000),
    strftime('%Y-%m-%dT%H:%M:%S', timer_created_at / 1000, 'unixepoch') || printf('.%03dZ', timer_created_at % 1000),
    NULL,
    'Scheduled'
FROM timers WHERE row_type = 2
UNION ALL
SELECT
    timer_namespace, timer_id, timer_correlation_id,
    strftime('%Y-%m-%dT%H:%M:%S', timer_scheduled_at / 1000, 'unixepoch') || printf('.%03dZ', timer_scheduled_at % 1000),
    strftime('%Y-%m-%dT%H:%M:%S', timer_created_at / 1000, 'unixepoch') || printf('.%03dZ', timer_created_at % 1000),
    strftime('%Y-%m-%dT%H:%M:%S', timer_reached_at / 1000, 'unixepoch') || printf('.%03dZ', timer_reached_at % 1000),
    'Reached'
FROM timers AS ended WHERE row_type = 3 AND timer_outcome <> 'cancelled'
AND NOT EXISTS (
    SELECT 1 FROM timers AS waiting WHERE waiting.row_type = 2 AND waiting.shard_id = ended.shard_id
    AND waiting.timer_namespace = ended.timer_namespace AND waiting.timer_id = ended.timer_id
)
AND NOT EXISTS (
    SELECT 1 FROM timers AS later WHERE later.row_type = 3 AND later.shard_id = ended.shard_id
    AND later.timer_namespace = ended.timer_namespace AND later.timer_id = ended.timer_id
    AND (later.timer_generation, later.timer_reached_at, later.timer_execute_at, later.timer_uuid_high, later.timer_uuid_low)
      > (ended.timer_generation, ended.timer_reached_at, ended.timer_execute_at, ended.timer_uuid_high, ended.timer_uuid_low)
);

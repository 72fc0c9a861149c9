-- The owner of each shard. Every write locks and reads its row. A small table of its own, not partitioned (ADR 12).
-- Free space in the pages (fillfactor) lets updates stay in their page, without a change of the index.
CREATE TABLE shards (
    shard_id            integer        PRIMARY KEY,
    shard_version       bigint         NOT NULL,
    shard_nonce         bigint         NOT NULL,
    shard_owner_id      text,
    shard_owner_address text,
    shard_claimed_at    timestamptz(3) NOT NULL,
    shard_low_water     bigint[]       -- milliseconds and the two halves of a uuid: a place, not only a time
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_cost_delay = 0);

-- What a commit does to the shard's row, as functions, because each then is a statement of its own within the
-- commit's: one that had to wait for a lock looks again at a row that was changed meanwhile, and PostgreSQL 18 was
-- seen to crash, or to find nothing, if the same statement also names a partitioned table (ADR 12).
--
-- Does the row still carry the fence? Locked from here on, against claims, or against everybody who would change it.
CREATE FUNCTION shard_fence_holds(id integer, version bigint, nonce bigint, to_change_it boolean) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    IF to_change_it THEN
        PERFORM 1 FROM shards WHERE shard_id = id AND shard_version = version AND shard_nonce = nonce
            AND shard_owner_id IS NOT NULL FOR NO KEY UPDATE;
    ELSE
        PERFORM 1 FROM shards WHERE shard_id = id AND shard_version = version AND shard_nonce = nonce
            AND shard_owner_id IS NOT NULL FOR SHARE;
    END IF;
    RETURN FOUND;
END
$$;

-- Only after the fence was found to hold.
CREATE FUNCTION shard_set_low_water(id integer, place bigint[]) RETURNS void
LANGUAGE sql AS $$
    UPDATE shards SET shard_low_water = place WHERE shard_id = id;
$$;

-- row_type: 2 a timer, 3 a reached timer. Text that is looked up is compared as bytes. The payload is text and not
-- json: it is kept byte for byte, whatever it is, and never parsed on the way in.
CREATE TABLE timers (
    shard_id                       integer        NOT NULL,
    row_type                       smallint       NOT NULL CHECK (row_type IN (2, 3)),
    row_format                     smallint       NOT NULL,
    timer_attempts                 integer,
    timer_execute_at               timestamptz(3) NOT NULL,  -- of a reached timer: when it may be purged
    timer_uuid_high                bigint         NOT NULL,  -- of a reached timer: of that occurrence
    timer_uuid_low                 bigint         NOT NULL,

    timer_generation               bigint,
    timer_scheduled_at             timestamptz(3),
    timer_created_at               timestamptz(3),
    timer_namespace                text COLLATE "C",
    timer_id                       text COLLATE "C",
    timer_callback_url             text,
    timer_payload                  text,
    timer_retry_policy             json,
    timer_callback_timeout_seconds integer,
    timer_correlation_id           text COLLATE "C",
    timer_options                  json,

    timer_outcome                  text,
    timer_reached_at               timestamptz(3),
    timer_own_execute_at           timestamptz(3),  -- the key of a reached row is not its timer's: these are
    timer_own_uuid_high            bigint,
    timer_own_uuid_low             bigint,

    CHECK ((row_type = 3) = (timer_outcome IS NOT NULL)),
    PRIMARY KEY (row_type, shard_id, timer_execute_at, timer_uuid_high, timer_uuid_low)
) PARTITION BY HASH (shard_id);

-- A timer is stored once; what became of it may be stored many times, newest last. Neither index speaks of
-- row_type, so that a question by id can use no other index, and one by time none of these: PostgreSQL has no way
-- to name an index, and must not be left a choice while it has no statistics.
CREATE UNIQUE INDEX timers_by_id ON timers (shard_id, timer_namespace, timer_id) WHERE timer_outcome IS NULL;
CREATE INDEX reached_by_id ON timers (shard_id, timer_namespace, timer_id, timer_generation, timer_reached_at)
    WHERE timer_outcome IS NOT NULL;
-- In list order, so that a trace is one range scan. Costs nothing for timers without a correlation id.
CREATE INDEX timers_by_correlation ON timers
    (timer_correlation_id, timer_namespace, row_type, timer_execute_at, timer_uuid_high, timer_uuid_low)
    WHERE timer_correlation_id IS NOT NULL;

-- Rows live for minutes and die by the million: vacuum early, and without the pauses meant for quieter tables.
DO $$
BEGIN
    FOR number IN 0..31 LOOP
        EXECUTE format(
            'CREATE TABLE timers_p%s PARTITION OF timers FOR VALUES WITH (MODULUS 32, REMAINDER %s) WITH ('
            'autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000,'
            'autovacuum_analyze_scale_factor = 0.05, autovacuum_analyze_threshold = 200,'
            'autovacuum_vacuum_cost_delay = 0)',
            lpad(number::text, 2, '0'), number
        );
    END LOOP;
END
$$;

-- A few rows, each changed twice a second: free space in the page (fillfactor) lets updates stay in it, without a change of the index.
CREATE TABLE members (
    instance_id text COLLATE "C" PRIMARY KEY,
    address     text           NOT NULL,
    counter     bigint         NOT NULL,
    alive       boolean        NOT NULL,
    joined_at   timestamptz(3) NOT NULL,
    secret      text           NOT NULL
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0);

CREATE TABLE namespaces (
    name       text COLLATE "C" PRIMARY KEY,
    num_shards integer NOT NULL,
    revision   bigint  NOT NULL,
    body       json    NOT NULL
);

-- For people and reports: one row per timer, as it stands or as it last ended. A cancelled timer has none:
-- its due time was not reached.
CREATE VIEW timer_schedules (tenant_id, service_call_id, correlation_id, due_at, registered_at, reached_at, state) AS
SELECT
    timer_namespace, timer_id, timer_correlation_id, timer_scheduled_at, timer_created_at, NULL::timestamptz(3),
    'Scheduled'
FROM timers WHERE row_type = 2
UNION ALL
SELECT
    timer_namespace, timer_id, timer_correlation_id, timer_scheduled_at, timer_created_at, timer_reached_at,
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

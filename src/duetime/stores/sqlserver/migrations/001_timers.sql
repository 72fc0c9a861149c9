-- Whose a shard is: what every write locks and looks at.
CREATE TABLE shards (
    shard_id            int          NOT NULL CONSTRAINT shards_key PRIMARY KEY CLUSTERED,
    shard_version       bigint       NOT NULL,
    shard_nonce         bigint       NOT NULL,
    shard_owner_id      nvarchar(255),
    shard_owner_address nvarchar(2048),
    shard_claimed_at    datetime2(3) NOT NULL,
    shard_low_water     varchar(100)  -- milliseconds and the two halves of a uuid: a place, not only a time
);

-- row_type: 2 a timer, 3 a reached timer. Not partitioned: the table is in the order of its shards as it is. The
-- payload is text and not checked to be JSON: it is kept byte for byte, whatever it is.
--
-- What is looked up is compared as bytes. No collation does that: SQL Server takes 'a' and 'a ' for equal under every
-- one of them, the binary ones too. So ids are varbinary, and their bytes those of nvarchar (UTF-16): CAST goes both
-- ways. Of two that differ in length the shorter is compared as if filled up with zeros, and no id has a NUL.
CREATE TABLE timers (
    shard_id                       int            NOT NULL,
    row_type                       smallint       NOT NULL CONSTRAINT timers_row_type CHECK (row_type IN (2, 3)),
    timer_execute_at               datetime2(3)   NOT NULL,  -- of a reached timer: when it may be purged
    timer_uuid_high                bigint         NOT NULL,  -- of a reached timer: of that occurrence
    timer_uuid_low                 bigint         NOT NULL,
    row_format                     smallint       NOT NULL,

    timer_namespace                varbinary(510) NOT NULL,
    timer_id                       varbinary(510) NOT NULL,
    timer_generation               bigint         NOT NULL,
    timer_scheduled_at             datetime2(3)   NOT NULL,
    timer_created_at               datetime2(3)   NOT NULL,
    timer_attempts                 int            NOT NULL,
    timer_callback_url             nvarchar(2048) NOT NULL,
    timer_payload                  nvarchar(max),
    timer_retry_policy             nvarchar(1000),
    timer_callback_timeout_seconds int,
    timer_correlation_id           varbinary(510),
    timer_options                  nvarchar(max),

    timer_own_execute_at           datetime2(3),  -- the key of a reached row is not its timer's: these are
    timer_own_uuid_high            bigint,
    timer_own_uuid_low             bigint,
    timer_outcome                  varchar(20),
    timer_reached_at               datetime2(3),

    CONSTRAINT timers_outcome
        CHECK (row_type = 2 AND timer_outcome IS NULL OR row_type = 3 AND timer_outcome IS NOT NULL),
    CONSTRAINT timers_key PRIMARY KEY CLUSTERED (shard_id, row_type, timer_execute_at, timer_uuid_high, timer_uuid_low)
);
-- A large batch must not lock the whole table.
ALTER TABLE timers SET (LOCK_ESCALATION = DISABLE);

-- A timer is stored once; what became of it may be stored many times, newest last.
CREATE UNIQUE INDEX timers_by_id ON timers (shard_id, timer_namespace, timer_id) WHERE row_type = 2;
CREATE INDEX reached_by_id ON timers (shard_id, timer_namespace, timer_id, timer_generation, timer_reached_at)
    WHERE row_type = 3;
-- In list order, so that a trace is one range scan. Costs nothing for timers without a correlation id.
CREATE INDEX timers_by_correlation ON timers
    (timer_correlation_id, timer_namespace, row_type, timer_execute_at, timer_uuid_high, timer_uuid_low)
    WHERE timer_correlation_id IS NOT NULL;

CREATE TABLE members (
    instance_id varbinary(510) NOT NULL CONSTRAINT members_key PRIMARY KEY,
    address     nvarchar(2048) NOT NULL,
    counter     bigint         NOT NULL,
    alive       bit            NOT NULL,
    joined_at   datetime2(3)   NOT NULL,
    secret      nvarchar(2048) NOT NULL
);

CREATE TABLE namespaces (
    name       varbinary(510) NOT NULL CONSTRAINT namespaces_key PRIMARY KEY,
    num_shards int            NOT NULL,
    revision   bigint         NOT NULL,
    body       nvarchar(max)  NOT NULL
);

-- For people and reports: one row per timer, as it stands or as it last ended. A cancelled timer has none:
-- its due time was not reached.
EXEC('CREATE VIEW timer_schedules (tenant_id, service_call_id, correlation_id, due_at, registered_at, reached_at, state) AS
SELECT CAST(timer_namespace AS nvarchar(255)), CAST(timer_id AS nvarchar(255)),
    CAST(timer_correlation_id AS nvarchar(255)), timer_scheduled_at, timer_created_at, timer_reached_at,
    CASE row_type WHEN 2 THEN ''Scheduled'' ELSE ''Reached'' END
FROM (
    SELECT *, ROW_NUMBER() OVER (
        PARTITION BY shard_id, timer_namespace, timer_id
        ORDER BY row_type, timer_generation DESC, timer_reached_at DESC,
            timer_execute_at DESC, timer_uuid_high DESC, timer_uuid_low DESC
    ) AS place
    FROM timers WHERE row_type IN (2, 3)
) AS latest
WHERE place = 1 AND (timer_outcome IS NULL OR timer_outcome <> ''cancelled'')');

-- For MySQL, MariaDB and TiDB alike; what only TiDB understands stands in comments that only TiDB reads. Text that is
-- looked up is VARBINARY: compared as bytes, and a space at its end counts, which it does not in any collation that
-- all three have. Times are DATETIME(3) in UTC: TIMESTAMP ends in 2038 and depends on the session's time zone.
-- Nothing here is transactional: every statement can be said again. The comment of a table says whose it is.

-- Whose a shard is: what every write locks and looks at.
CREATE TABLE IF NOT EXISTS shards (
    shard_id             INT          NOT NULL,
    shard_version        BIGINT       NOT NULL,
    shard_nonce          BIGINT       NOT NULL,
    shard_owner_id       VARCHAR(255),
    shard_owner_address  VARCHAR(2048),
    shard_claimed_at     DATETIME(3)  NOT NULL,
    shard_low_water_ms   BIGINT,      -- and the two halves of a uuid: a place, not only a time
    shard_low_water_high BIGINT,
    shard_low_water_low  BIGINT,
    PRIMARY KEY (shard_id) /*T![clustered_index] CLUSTERED */
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin COMMENT = 'duetime';

-- Timers and reached timers are two tables, because there are no partial indexes here: in one, each would be in the
-- index of the other too (measured: a seventh to a quarter fewer rows a second), and what makes a timer unique would
-- have to be told apart by NULLs.
CREATE TABLE IF NOT EXISTS timers (
    shard_id                       INT            NOT NULL,
    row_format                     SMALLINT       NOT NULL,
    timer_execute_at               DATETIME(3)    NOT NULL,
    timer_uuid_high                BIGINT         NOT NULL,
    timer_uuid_low                 BIGINT         NOT NULL,
    timer_namespace                VARBINARY(255) NOT NULL,
    timer_id                       VARBINARY(255) NOT NULL,
    timer_generation               BIGINT         NOT NULL,
    timer_scheduled_at             DATETIME(3)    NOT NULL,
    timer_created_at               DATETIME(3)    NOT NULL,
    timer_attempts                 INT            NOT NULL,
    timer_callback_url             TEXT           NOT NULL,
    timer_payload                  LONGTEXT,      -- not JSON, which is parsed and written anew: kept byte for byte
    timer_retry_policy             TEXT,
    timer_callback_timeout_seconds INT,
    timer_correlation_id           VARBINARY(255),
    timer_options                  MEDIUMTEXT,
    PRIMARY KEY (shard_id, timer_execute_at, timer_uuid_high, timer_uuid_low) /*T![clustered_index] CLUSTERED */,
    UNIQUE KEY timers_by_id (shard_id, timer_namespace, timer_id),
    -- In list order, so that a trace is one range scan.
    KEY timers_by_correlation
        (timer_correlation_id, timer_namespace, timer_execute_at, timer_uuid_high, timer_uuid_low)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin COMMENT = 'duetime';

CREATE TABLE IF NOT EXISTS reached (
    shard_id                       INT            NOT NULL,
    row_format                     SMALLINT       NOT NULL,
    timer_execute_at               DATETIME(3)    NOT NULL,  -- when it may be purged
    timer_uuid_high                BIGINT         NOT NULL,  -- of that occurrence
    timer_uuid_low                 BIGINT         NOT NULL,
    timer_namespace                VARBINARY(255) NOT NULL,
    timer_id                       VARBINARY(255) NOT NULL,
    timer_generation               BIGINT         NOT NULL,
    timer_scheduled_at             DATETIME(3)    NOT NULL,
    timer_created_at               DATETIME(3)    NOT NULL,
    timer_attempts                 INT            NOT NULL,
    timer_callback_url             TEXT           NOT NULL,
    timer_payload                  LONGTEXT,
    timer_retry_policy             TEXT,
    timer_callback_timeout_seconds INT,
    timer_correlation_id           VARBINARY(255),
    timer_options                  MEDIUMTEXT,
    timer_own_execute_at           DATETIME(3)    NOT NULL,  -- the key of the row is not its timer's: these are
    timer_own_uuid_high            BIGINT         NOT NULL,
    timer_own_uuid_low             BIGINT         NOT NULL,
    timer_outcome                  VARCHAR(16)    NOT NULL,
    timer_reached_at               DATETIME(3)    NOT NULL,
    PRIMARY KEY (shard_id, timer_execute_at, timer_uuid_high, timer_uuid_low) /*T![clustered_index] CLUSTERED */,
    -- Newest last. It ends with the primary key, as every index of InnoDB does anyway: for TiDB it has to be said.
    KEY reached_by_id
        (shard_id, timer_namespace, timer_id, timer_generation, timer_reached_at,
         timer_execute_at, timer_uuid_high, timer_uuid_low),
    KEY reached_by_correlation
        (timer_correlation_id, timer_namespace, timer_execute_at, timer_uuid_high, timer_uuid_low)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin COMMENT = 'duetime';

CREATE TABLE IF NOT EXISTS members (
    instance_id VARBINARY(255) NOT NULL,
    address     VARCHAR(2048)  NOT NULL,
    counter     BIGINT         NOT NULL,
    alive       TINYINT        NOT NULL,
    joined_at   DATETIME(3)    NOT NULL,
    secret      TEXT           NOT NULL,
    PRIMARY KEY (instance_id) /*T![clustered_index] CLUSTERED */
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin COMMENT = 'duetime';

CREATE TABLE IF NOT EXISTS namespaces (
    name       VARBINARY(255) NOT NULL,
    num_shards INT            NOT NULL,
    revision   BIGINT         NOT NULL,
    body       LONGTEXT       NOT NULL,
    PRIMARY KEY (name) /*T![clustered_index] CLUSTERED */
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin COMMENT = 'duetime';

-- For people and reports: one row per timer, as it stands or as it last ended. A cancelled timer has none:
-- its due time was not reached.
CREATE OR REPLACE SQL SECURITY INVOKER VIEW timer_schedules
    (tenant_id, service_call_id, correlation_id, due_at, registered_at, reached_at, state) AS
SELECT
    CONVERT(timer_namespace USING utf8mb4), CONVERT(timer_id USING utf8mb4),
    CONVERT(timer_correlation_id USING utf8mb4), timer_scheduled_at, timer_created_at, NULL, 'Scheduled'
FROM timers
UNION ALL
SELECT
    CONVERT(ended.timer_namespace USING utf8mb4), CONVERT(ended.timer_id USING utf8mb4),
    CONVERT(ended.timer_correlation_id USING utf8mb4), ended.timer_scheduled_at, ended.timer_created_at,
    ended.timer_reached_at, 'Reached'
FROM reached AS ended WHERE ended.timer_outcome <> 'cancelled'
AND NOT EXISTS (
    SELECT 1 FROM timers AS waiting WHERE waiting.shard_id = ended.shard_id
    AND waiting.timer_namespace = ended.timer_namespace AND waiting.timer_id = ended.timer_id
)
AND NOT EXISTS (
    SELECT 1 FROM reached AS later WHERE later.shard_id = ended.shard_id
    AND later.timer_namespace = ended.timer_namespace AND later.timer_id = ended.timer_id
    AND (later.timer_generation, later.timer_reached_at, later.timer_execute_at, later.timer_uuid_high, later.timer_uuid_low)
      > (ended.timer_generation, ended.timer_reached_at, ended.timer_execute_at, ended.timer_uuid_high, ended.timer_uuid_low)
)

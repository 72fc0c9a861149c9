-- One statement between two lines of "/". Each commits by itself, so what was broken off is gone on with:
-- schema.py says how.
--
-- Lengths are bytes, whatever the database's default. Oracle takes '' for NULL, so an empty text is stored as CHR(0),
-- and one that begins with CHR(0) with one more in front (rows.py). Payload, options and bodies are the bytes of
-- their UTF-8 text: a BLOB is never converted, so it is kept byte for byte.

-- The owner of each shard. Every write locks and reads its row. INITRANS leaves space for many transactions at once.
CREATE TABLE shards (
    shard_id            NUMBER(10)   NOT NULL CONSTRAINT shards_key PRIMARY KEY,
    shard_version       NUMBER(19)   NOT NULL,
    shard_nonce         NUMBER(19)   NOT NULL,
    shard_owner_id      VARCHAR2(255 BYTE),
    shard_owner_address VARCHAR2(2048 BYTE),
    shard_claimed_at    TIMESTAMP(3) NOT NULL,
    shard_low_water     VARCHAR2(100 BYTE)  -- milliseconds and the two halves of a uuid: a place, not only a time
) PCTFREE 50 INITRANS 16
/
-- Timers and reached timers are two tables, because there are no indexes over some of the rows here: in one, what makes
-- a timer unique would have to be told apart by expressions. Not partitioned: that is an option which not every
-- edition has, and an index-organised table is in the order of its shards as it is. What may be long goes to the
-- overflow, so that the index stays dense.
CREATE TABLE timers (
    shard_id                       NUMBER(10)          NOT NULL,
    timer_execute_at               TIMESTAMP(3)        NOT NULL,
    timer_uuid_high                NUMBER(19)          NOT NULL,
    timer_uuid_low                 NUMBER(19)          NOT NULL,
    row_format                     NUMBER(5)           NOT NULL,
    timer_namespace                VARCHAR2(255 BYTE)  NOT NULL,
    timer_id                       VARCHAR2(255 BYTE)  NOT NULL,
    timer_generation               NUMBER(19)          NOT NULL,
    timer_scheduled_at             TIMESTAMP(3)        NOT NULL,
    timer_created_at               TIMESTAMP(3)        NOT NULL,
    timer_attempts                 NUMBER(10)          NOT NULL,
    timer_callback_timeout_seconds NUMBER(10),
    timer_correlation_id           VARCHAR2(255 BYTE),
    timer_callback_url             VARCHAR2(2049 BYTE) NOT NULL,
    timer_retry_policy             VARCHAR2(1000 BYTE),
    timer_options                  BLOB,
    timer_payload                  BLOB,
    CONSTRAINT timers_key PRIMARY KEY (shard_id, timer_execute_at, timer_uuid_high, timer_uuid_low)
)
ORGANIZATION INDEX INITRANS 8 PCTTHRESHOLD 20 INCLUDING timer_correlation_id OVERFLOW INITRANS 8
/
CREATE UNIQUE INDEX timers_by_id ON timers (shard_id, timer_namespace, timer_id) INITRANS 8
/
-- In list order, so that a trace is one range scan.
CREATE INDEX timers_by_correlation ON timers
    (timer_correlation_id, timer_namespace, timer_execute_at, timer_uuid_high, timer_uuid_low) INITRANS 8
/
CREATE TABLE reached (
    shard_id                       NUMBER(10)          NOT NULL,
    timer_execute_at               TIMESTAMP(3)        NOT NULL,  -- when it may be purged
    timer_uuid_high                NUMBER(19)          NOT NULL,  -- of that occurrence
    timer_uuid_low                 NUMBER(19)          NOT NULL,
    row_format                     NUMBER(5)           NOT NULL,
    timer_namespace                VARCHAR2(255 BYTE)  NOT NULL,
    timer_id                       VARCHAR2(255 BYTE)  NOT NULL,
    timer_generation               NUMBER(19)          NOT NULL,
    timer_scheduled_at             TIMESTAMP(3)        NOT NULL,
    timer_created_at               TIMESTAMP(3)        NOT NULL,
    timer_attempts                 NUMBER(10)          NOT NULL,
    timer_callback_timeout_seconds NUMBER(10),
    timer_correlation_id           VARCHAR2(255 BYTE),
    timer_own_execute_at           TIMESTAMP(3)        NOT NULL,  -- the key of the row is not its timer's: these are
    timer_own_uuid_high            NUMBER(19)          NOT NULL,
    timer_own_uuid_low             NUMBER(19)          NOT NULL,
    timer_outcome                  VARCHAR2(20 BYTE)   NOT NULL,
    timer_reached_at               TIMESTAMP(3)        NOT NULL,
    timer_callback_url             VARCHAR2(2049 BYTE) NOT NULL,
    timer_retry_policy             VARCHAR2(1000 BYTE),
    timer_options                  BLOB,
    timer_payload                  BLOB,
    CONSTRAINT reached_key PRIMARY KEY (shard_id, timer_execute_at, timer_uuid_high, timer_uuid_low)
)
ORGANIZATION INDEX INITRANS 8 PCTTHRESHOLD 20 INCLUDING timer_reached_at OVERFLOW INITRANS 8
/
-- Newest last.
CREATE INDEX reached_by_id ON reached
    (shard_id, timer_namespace, timer_id, timer_generation, timer_reached_at) INITRANS 8
/
CREATE INDEX reached_by_correlation ON reached
    (timer_correlation_id, timer_namespace, timer_execute_at, timer_uuid_high, timer_uuid_low) INITRANS 8
/
CREATE TABLE members (
    instance_id VARCHAR2(255 BYTE)  NOT NULL CONSTRAINT members_key PRIMARY KEY,
    address     VARCHAR2(2048 BYTE) NOT NULL,
    counter     NUMBER(19)          NOT NULL,
    alive       NUMBER(1)           NOT NULL,
    joined_at   TIMESTAMP(3)        NOT NULL,
    secret      VARCHAR2(2048 BYTE) NOT NULL
) PCTFREE 50 INITRANS 16
/
CREATE TABLE namespaces (
    name       VARCHAR2(255 BYTE) NOT NULL CONSTRAINT namespaces_key PRIMARY KEY,
    num_shards NUMBER(10)         NOT NULL,
    revision   NUMBER(19)         NOT NULL,
    body       BLOB               NOT NULL
)
/
-- For people and reports: one row per timer, as it stands or as it last ended. A cancelled timer has none:
-- its due time was not reached.
CREATE VIEW timer_schedules (tenant_id, service_call_id, correlation_id, due_at, registered_at, reached_at, state) AS
SELECT
    timer_namespace, timer_id, timer_correlation_id, timer_scheduled_at, timer_created_at, CAST(NULL AS TIMESTAMP(3)),
    'Scheduled'
FROM timers
UNION ALL
SELECT
    timer_namespace, timer_id, timer_correlation_id, timer_scheduled_at, timer_created_at, timer_reached_at, 'Reached'
FROM (
    SELECT shard_id, timer_namespace, timer_id, timer_correlation_id, timer_scheduled_at, timer_created_at,
        timer_reached_at, timer_outcome, ROW_NUMBER() OVER (
            PARTITION BY shard_id, timer_namespace, timer_id
            ORDER BY timer_generation DESC, timer_reached_at DESC,
                timer_execute_at DESC, timer_uuid_high DESC, timer_uuid_low DESC
        ) AS place
    FROM reached
) ended
WHERE place = 1 AND timer_outcome <> 'cancelled'
AND NOT EXISTS (
    SELECT 1 FROM timers waiting WHERE waiting.shard_id = ended.shard_id
    AND waiting.timer_namespace = ended.timer_namespace AND waiting.timer_id = ended.timer_id
)
/

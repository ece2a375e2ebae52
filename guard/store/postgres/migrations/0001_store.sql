-- One row for each key. expires is in microseconds since 1970; the largest number is never.
CREATE TABLE {schema}.entries (
	key     bytea  PRIMARY KEY,
	value   bytea  NOT NULL,
	version bigint NOT NULL,
	expires bigint NOT NULL
);
CREATE INDEX entries_expires ON {schema}.entries (expires) WHERE expires < 9223372036854775807;
CREATE SEQUENCE {schema}.versions;

-- Values are sealed above the store, so compressing them costs time and saves nothing.
ALTER TABLE {schema}.entries ALTER COLUMN value SET STORAGE EXTERNAL;
ALTER TABLE {schema}.entries SET (
	autovacuum_vacuum_scale_factor = 0.02,
	autovacuum_vacuum_insert_scale_factor = 0.05,
	autovacuum_vacuum_cost_limit = 2000,
	toast.autovacuum_vacuum_scale_factor = 0.02,
	toast.autovacuum_vacuum_cost_limit = 2000
);

-- What became of a group of commits, for a writer whose connection was lost meanwhile. No winners
-- at all (NULL) means that the group was called off.
CREATE TABLE {schema}.commits (
	writer  uuid   NOT NULL,
	seq     bigint NOT NULL,
	at      bigint NOT NULL,
	winners int[],
	versions bigint[],
	PRIMARY KEY (writer, seq)
);

-- One row: who may write. Its lock puts all commits in one order.
CREATE TABLE {schema}.lease (
	one     boolean PRIMARY KEY DEFAULT true CHECK (one),
	epoch   bigint NOT NULL,
	holder  text   NOT NULL,
	expires bigint NOT NULL
);
INSERT INTO {schema}.lease (epoch, holder, expires) VALUES (0, '', 0);

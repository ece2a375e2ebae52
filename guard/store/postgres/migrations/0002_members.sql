-- One row for each gateway that uses the store: it may write while its row is there. Times are in
-- microseconds since 1970. An empty node has the store to itself.
CREATE TABLE {schema}.members (
	boot    text    PRIMARY KEY,
	node    text    NOT NULL UNIQUE,
	holder  text    NOT NULL, -- host and process, for people
	lock    bigint  NOT NULL, -- the key of its session's advisory lock
	session boolean NOT NULL, -- whether it has that lock
	joined  bigint  NOT NULL,
	seen    bigint  NOT NULL,
	expires bigint  NOT NULL,
	read    bigint  NOT NULL, -- how far it has read the feed
	about   text    NOT NULL  -- JSON
);

-- Which keys were written, in the order of the commits, while there is more than one member. No keys
-- at all (NULL) means that there were too many. The newest row always stays.
CREATE TABLE {schema}.feed (
	seq  bigint  PRIMARY KEY,
	boot text    NOT NULL,
	at   bigint  NOT NULL,
	gone boolean NOT NULL, -- the member was removed, or has left
	keys bytea[]
);
CREATE SEQUENCE {schema}.feed_seq;
ALTER TABLE {schema}.feed SET (
	autovacuum_vacuum_scale_factor = 0.02,
	autovacuum_vacuum_cost_limit = 2000
);

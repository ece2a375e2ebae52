-- The lowest version of the schema whose builds can use it as it is at this version. NULL: none below.
ALTER TABLE {schema}.migrations ADD COLUMN oldest int;

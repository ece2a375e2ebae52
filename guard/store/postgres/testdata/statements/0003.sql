
with w as materialized (
 select * from unnest($1::int[], $3::int[], $4::bytea[], $5::bytea[], $6::bigint[], $7::bigint[], $8::int[])
  as w (batch, place, key, value, expires, want, kind)
), fence as materialized (
 select $9::text is not null and not exists (
  select from {schema}.members m where m.boot = $9::text and exists (select from {schema}.lease where one and epoch = $14::bigint)
 ) as lost
), losers as materialized (
 select distinct on (w.batch) w.batch, w.place, e.version, e.value, e.expires
 from w left join lateral (
  select e.version, e.value, e.expires from {schema}.entries e where e.key = w.key and e.expires > coalesce($2::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint) offset 0
 ) e on true
 where w.want <> -1 and coalesce(e.version, 0) <> w.want
 order by w.batch, w.place
), winners as materialized (
 select b.batch, nextval('{schema}.versions') as version
 from (select distinct w.batch from w cross join fence
  where not fence.lost and not exists (select from losers where losers.batch = w.batch)) b
), puts as (
 insert into {schema}.entries (key, value, version, expires)
 select w.key, w.value, winners.version, w.expires from w join winners on winners.batch = w.batch where w.kind = 0
 on conflict (key) do update set value = excluded.value, version = excluded.version, expires = excluded.expires
), deletes as (
 delete from {schema}.entries where key = any(array(
  select w.key from w join winners on winners.batch = w.batch where w.kind = 1))
), feed as (
 insert into {schema}.feed (seq, boot, at, gone, keys)
 select nextval('{schema}.feed_seq'), coalesce($9::text, ''), (extract(epoch from clock_timestamp()) * 1000000)::bigint, false,
  case when count(*) <= 8192 then array_agg(w.key) end
 from w join winners on winners.batch = w.batch
 where w.kind < 2 and (select exists (select from {schema}.members where boot <> coalesce($9::text, '')))
 having count(*) > 0
 returning pg_notify('{channel}', '')
), note as (
 insert into {schema}.commits (writer, seq, at, winners, versions)
 select $10::uuid, $11::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint,
  coalesce(array_agg(batch order by batch), '{}'), coalesce(array_agg(version order by batch), '{}') from winners
), tidy as (
 delete from {schema}.commits where writer = $10::uuid and seq >= $12::bigint and seq < $13::bigint
)
select batch, -1 as place, version, null::bytea as value, 0::bigint as expires from winners
union all
select batch, place, coalesce(version, 0), value, coalesce(expires, 0) from losers
union all
select -1, -1, 0, null, 0 from fence where lost
;
delete from {schema}.commits where at < (extract(epoch from clock_timestamp()) * 1000000)::bigint - 24 * 3600 * 1000000::bigint
;
delete from {schema}.entries where key = any(array(
  select key from {schema}.entries where expires < 9223372036854775807 and expires <= coalesce($2::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint)
  order by expires limit $1 for update skip locked))
;
delete from {schema}.feed where seq = any(array(
  select seq from {schema}.feed where seq >= $1 and seq < (select max(seq) from {schema}.feed)
   and (seq < (select min(read) from {schema}.members) or at < (extract(epoch from clock_timestamp()) * 1000000)::bigint - $2)
  order by seq limit $3 for update skip locked)) returning seq
;
insert into {schema}.commits (writer, seq, at) values ($1, $2, (extract(epoch from clock_timestamp()) * 1000000)::bigint)
  on conflict (writer, seq) do update set at = excluded.at returning winners is not null
;
insert into {schema}.feed (seq, boot, at, gone, keys)
  values (nextval('{schema}.feed_seq'), $1, (extract(epoch from clock_timestamp()) * 1000000)::bigint, false, '{}') returning seq, at
;
insert into {schema}.members (boot, node, holder, lock, session, joined, seen, expires, read, about)
  values ($1, $2, $3, $4, $5, $6, $6, $6::bigint + $7::bigint, $8, '{}')
;
select boot, expires, expires <= (extract(epoch from clock_timestamp()) * 1000000)::bigint,
  case when session then pg_try_advisory_xact_lock_shared(lock) else false end from {schema}.members where boot <> $1
;
select boot, node, holder, expires, lock, session from {schema}.members where node = $1 or node = '' or $1 = ''
;
select coalesce(max(version), 0) from {schema}.migrations
;
select epoch from {schema}.lease where one for update
;
select epoch, holder, expires, (extract(epoch from clock_timestamp()) * 1000000)::bigint from {schema}.lease where one for update
;
select key, value, version, expires from {schema}.entries where key >= $1 and expires > coalesce($2::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint) and key < $3 order by key desc limit 2
;
select key, value, version, expires from {schema}.entries where key >= $1 and expires > coalesce($2::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint) and key < $3 order by key limit 256
;
select key, value, version, expires from {schema}.entries where key >= $1 and expires > coalesce($2::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint) order by key desc limit 256
;
select key, value, version, expires from {schema}.entries where key >= $1 and expires > coalesce($2::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint) order by key limit 256
;
select node, boot, joined, seen, about from {schema}.members order by node, boot
;
select not exists (select from {schema}.members where boot = $1)
;
select pg_terminate_backend(a.pid) from pg_stat_activity a where a.pid <> pg_backend_pid() and a.usename = current_user and a.xact_start < pg_catalog.clock_timestamp() - make_interval(secs => $1) and a.pid in (select l.pid from pg_locks l where l.granted and l.locktype = 'relation' and l.mode in ('RowShareLock', 'RowExclusiveLock') and l.relation = '{schema}.lease'::regclass and l.database = (select oid from pg_database where datname = current_database())) and not exists (select from pg_locks w where w.pid = a.pid and not w.granted)
;
select seq, boot, gone, boot <> $2 and keys is null, case when boot <> $2 then keys end from {schema}.feed where seq >= $1 order by seq limit 64
;
select seq, winners, versions from {schema}.commits where writer = $1 and seq >= $2 and seq < $3
;
select value, version, expires from {schema}.entries where key = $1 and expires > coalesce($2::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint)
;
update {schema}.lease set epoch = case when holder = '' then epoch else epoch + 1 end,
  holder = '', expires = 0 where one returning epoch
;
update {schema}.members set seen = (extract(epoch from clock_timestamp()) * 1000000)::bigint, expires = (extract(epoch from clock_timestamp()) * 1000000)::bigint + $2, session = $3, read = $4, about = $5
  where boot = $1 and exists (select from {schema}.lease where one and epoch = $6) returning seen
;
with gone as (delete from {schema}.members where boot = $1 returning boot)
  insert into {schema}.feed (seq, boot, at, gone, keys)
  select nextval('{schema}.feed_seq'), boot, (extract(epoch from clock_timestamp()) * 1000000)::bigint, true, '{}' from gone
  returning pg_notify('{channel}', '')
;
with gone as (delete from {schema}.members where boot = any($1) returning boot)
  insert into {schema}.feed (seq, boot, at, gone, keys)
  select nextval('{schema}.feed_seq'), boot, (extract(epoch from clock_timestamp()) * 1000000)::bigint, true, '{}' from gone
  returning pg_notify('{channel}', '')
;
with gone as (delete from {schema}.members where boot = any($1::text[]) and (expires <= (extract(epoch from clock_timestamp()) * 1000000)::bigint or session and
  expires = ($2::bigint[])[array_position($1::text[], boot)] and pg_try_advisory_xact_lock_shared(lock)) returning boot)
  insert into {schema}.feed (seq, boot, at, gone, keys)
  select nextval('{schema}.feed_seq'), boot, (extract(epoch from clock_timestamp()) * 1000000)::bigint, true, '{}' from gone
  returning pg_notify('{channel}', '')
;

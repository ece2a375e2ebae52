
with w as materialized (
 select * from unnest($1::bytea[], $3::bytea[], $4::bigint[], $5::bigint[], $6::int[], $10::int[]) with ordinality
  as w (key, value, expires, want, kind, batch, place)
), losers as materialized (
 select distinct on (w.batch) w.batch, w.place, e.version, e.value, e.expires
 from w left join lateral (
  select e.version, e.value, e.expires from {schema}.entries e where e.key = w.key and e.expires > coalesce($2::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint) offset 0
 ) e on true
 where w.want <> -1 and coalesce(e.version, 0) <> w.want
 order by w.batch, w.place
), won as materialized (
 select case when $7::text is not null and not exists (
  select from {schema}.members m where m.boot = $7::text
 ) then null else (
  select array_agg(case when b.batch in (select batch from losers) then 0 else nextval('{schema}.versions') end order by b.batch)
  from generate_series(0, $11::int - 1) b (batch)
 ) end as versions
), puts as (
 insert into {schema}.entries (key, value, version, expires)
 select w.key, w.value, won.versions[w.batch + 1], w.expires from won cross join w where w.kind = 0 and won.versions[w.batch + 1] > 0
 on conflict (key) do update set value = excluded.value, version = excluded.version, expires = excluded.expires
), deletes as (
 delete from {schema}.entries where key = any(array(
  select w.key from won cross join w where w.kind = 1 and won.versions[w.batch + 1] > 0))
), feed as (
 insert into {schema}.feed (seq, boot, at, gone, keys)
 select nextval('{schema}.feed_seq'), coalesce($7::text, ''), (extract(epoch from clock_timestamp()) * 1000000)::bigint, false,
  case when count(*) <= 8192 then array_agg(w.key) end
 from won cross join w
 where w.kind < 2 and won.versions[w.batch + 1] > 0 and (select exists (select from {schema}.members where boot <> coalesce($7::text, '')))
 having count(*) > 0
 returning pg_notify('{channel}', '')
), note as (
 insert into {schema}.commits (writer, seq, at, winners, versions)
 select $8::uuid, $9::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint, '{}', won.versions from won
)
select -1 as batch, 0::bigint as place, 0::bigint as version, null::bytea as value, 0::bigint as expires, versions from won
union all
select batch, place, coalesce(version, 0), value, coalesce(expires, 0), null from losers
;

with w as materialized (
 select *, 0 as batch from unnest($1::bytea[], $3::bytea[], $4::bigint[], $5::bigint[], $6::int[]) with ordinality
  as w (key, value, expires, want, kind, place)
), losers as materialized (
 select w.batch, w.place, e.version, e.value, e.expires
 from w left join lateral (
  select e.version, e.value, e.expires from {schema}.entries e where e.key = w.key and e.expires > coalesce($2::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint) offset 0
 ) e on true
 where w.want <> -1 and coalesce(e.version, 0) <> w.want
 order by w.place limit 1
), won as materialized (
 select case when $7::text is not null and not exists (
  select from {schema}.members m where m.boot = $7::text
 ) then null
  when exists (select from losers) then (select array[1 / (place - place)] from losers)
  else array[nextval('{schema}.versions')] end as versions
), puts as (
 insert into {schema}.entries (key, value, version, expires)
 select w.key, w.value, won.versions[w.batch + 1], w.expires from won cross join w where w.kind = 0 and won.versions[w.batch + 1] > 0
 on conflict (key) do update set value = excluded.value, version = excluded.version, expires = excluded.expires
), deletes as (
 delete from {schema}.entries where key = any(array(
  select w.key from won cross join w where w.kind = 1 and won.versions[w.batch + 1] > 0))
), feed as (
 insert into {schema}.feed (seq, boot, at, gone, keys)
 select nextval('{schema}.feed_seq'), coalesce($7::text, ''), (extract(epoch from clock_timestamp()) * 1000000)::bigint, false,
  case when count(*) <= 8192 then array_agg(w.key) end
 from won cross join w
 where w.kind < 2 and won.versions[w.batch + 1] > 0 and (select exists (select from {schema}.members where boot <> coalesce($7::text, '')))
 having count(*) > 0
 returning pg_notify('{channel}', '')
), note as (
 insert into {schema}.commits (writer, seq, at, winners, versions)
 select $8::uuid, $9::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint, '{}', won.versions from won
)
select -1 as batch, 0::bigint as place, 0::bigint as version, null::bytea as value, 0::bigint as expires, versions from won
union all
select batch, place, coalesce(version, 0), value, coalesce(expires, 0), null from losers
;

with w as materialized (
 select *, 0 as batch from unnest($1::bytea[], $3::bytea[], $4::bigint[], $5::bigint[], $6::int[]) with ordinality
  as w (key, value, expires, want, kind, place)
), losers as materialized (
 select w.batch, w.place, e.version, e.value, e.expires
 from w left join lateral (
  select e.version, e.value, e.expires from {schema}.entries e where e.key = w.key and e.expires > coalesce($2::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint) offset 0
 ) e on true
 where w.want <> -1 and coalesce(e.version, 0) <> w.want
 order by w.place limit 1
), won as materialized (
 select case when $7::text is not null and not exists (
  select from {schema}.members m where m.boot = $7::text
 ) then null
  when exists (select from losers) then array[0::bigint]
  else array[nextval('{schema}.versions')] end as versions
), puts as (
 insert into {schema}.entries (key, value, version, expires)
 select w.key, w.value, won.versions[w.batch + 1], w.expires from won cross join w where w.kind = 0 and won.versions[w.batch + 1] > 0
 on conflict (key) do update set value = excluded.value, version = excluded.version, expires = excluded.expires
), deletes as (
 delete from {schema}.entries where key = any(array(
  select w.key from won cross join w where w.kind = 1 and won.versions[w.batch + 1] > 0))
), feed as (
 insert into {schema}.feed (seq, boot, at, gone, keys)
 select nextval('{schema}.feed_seq'), coalesce($7::text, ''), (extract(epoch from clock_timestamp()) * 1000000)::bigint, false,
  case when count(*) <= 8192 then array_agg(w.key) end
 from won cross join w
 where w.kind < 2 and won.versions[w.batch + 1] > 0 and (select exists (select from {schema}.members where boot <> coalesce($7::text, '')))
 having count(*) > 0
 returning pg_notify('{channel}', '')
), note as (
 insert into {schema}.commits (writer, seq, at, winners, versions)
 select $8::uuid, $9::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint, '{}', won.versions from won
)
select -1 as batch, 0::bigint as place, 0::bigint as version, null::bytea as value, 0::bigint as expires, versions from won
union all
select batch, place, coalesce(version, 0), value, coalesce(expires, 0), null from losers
;
delete from {schema}.commits where at < (extract(epoch from clock_timestamp()) * 1000000)::bigint - 24 * 3600 * 1000000::bigint
;
delete from {schema}.commits where writer = $1 and seq >= $2 and seq < $3 and winners is not null
;
delete from {schema}.entries where key = any(array(
  select key from {schema}.entries where expires < 9223372036854775807 and expires <= (select coalesce($2::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint))
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
select (extract(epoch from clock_timestamp()) * 1000000)::bigint from {schema}.lease where one for update
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
select key, case when octet_length(value) <= 16384 then value end, version, expires from {schema}.entries where key = any($1::bytea[]) and expires > coalesce($2::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint)
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
select pg_terminate_backend(a.pid) from pg_stat_activity a
where a.pid <> pg_backend_pid() and a.usename = current_user
 and (a.state like 'idle in transaction%' or a.wait_event_type = 'Client')
 and a.state_change < pg_catalog.clock_timestamp() - make_interval(secs => case when a.state = 'active' then 2 else 1 end * $1::float8)
 and a.pid in (select l.pid from pg_locks l where l.granted and l.locktype = 'relation'
  and l.mode in ('RowShareLock', 'RowExclusiveLock') and l.relation = '{schema}.lease'::regclass
  and l.database = (select oid from pg_database where datname = current_database()))
;
select seq, boot, gone, boot <> $2 and keys is null, case when boot <> $2 then keys end from {schema}.feed where seq >= $1 order by seq limit 64
;
select seq, versions from {schema}.commits where writer = $1 and seq >= $2 and seq < $3
;
select value, version, expires from {schema}.entries where key = $1 and expires > coalesce($2::bigint, (extract(epoch from clock_timestamp()) * 1000000)::bigint)
;
update {schema}.members set seen = (extract(epoch from clock_timestamp()) * 1000000)::bigint, expires = (extract(epoch from clock_timestamp()) * 1000000)::bigint + $2, session = $3, read = $4, about = $5
  where boot = $1 returning seen
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

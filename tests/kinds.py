"""A table with the built-in types, and with values that hardly any other database has.

The wheel's PostgreSQL is built without libxml, so an xml column can be there and hold nothing.
"""

KINDS = r"""
CREATE TYPE mood AS ENUM ('sad', 'so, so', 'happy');
CREATE TYPE pair AS (a int, b text);
CREATE DOMAIN tiny AS smallint CHECK (value < 100);
CREATE DOMAIN price AS numeric(10, 2);
CREATE DOMAIN moment AS timetz;
CREATE TABLE kinds (
    id int PRIMARY KEY, small int2, big int8, real4 float4, real8 float8, exact numeric(12, 2), free numeric, flag bool,
    words text, short varchar(20), fixed char(5), one "char", called name, raw bytea, day date, clock time,
    clock3 time(3), zoned timetz, moment timestamp, at_zone timestamptz, uid uuid, span interval,
    span2 interval day to second, doc json, docb jsonb, address inet, net cidr, mac macaddr, bits bit(5),
    bits2 varbit(9), cash money, search tsvector, query tsquery, spot point, poly polygon, around box,
    numbers int4range, times tstzrange, several int4multirange, wal pg_lsn, txid xid8, oids oid, class regclass,
    path jsonpath, markup xml, feel mood, two pair, little tiny, cost price, at moment, ints int[], texts text[],
    nums numeric(8, 3)[], stamps timestamptz[], matrix int[], blobs bytea[], docs jsonb[], feels mood[], boxes box[],
    flags bool[], ranges int4range[], shorts varchar(3)[], classes regclass[]
);
INSERT INTO kinds VALUES (
    1, -32768, 9007199254740993, 0.1, 0.30000000000000004, 1234567890.10, 1e30, true, E'ünï\t"c\\o\nde''$1 %s %',
    'v', 'ab', 'x', 'n', '\x00ff5c', '2024-02-29', '10:11:12.5', '10:11:12.345', '10:11:12+02',
    '2024-02-29 10:11:12.123456', '2024-02-29 10:11:12.1+02', '00000000-0000-0000-0000-000000000001',
    '-1 day -02:03:04.5', '1 day 00:00:01',
    '{"a": [1, null, "ü\"x", 1.5e400, true], "b": {"c": "\u0000"}}',
    '{"a": [1, 12345678901234567890123, 0.1], "b": "s"}',
    '10.0.0.1/8', '10.0.0.0/8', '08:00:2b:01:02:03', '10101', '101', '1234.50', 'a:1A fat:2B', 'fat & (rat | !cat)',
    '(1.5,2)', '((0,0),(1,1),(2,0))', '(2,2),(0,0)', '[1,5)', '[2024-01-01 00:00+00,)', '{[1,3),[7,9)}',
    '16/B374D848', '99999999999', 4294967295, 'kinds', '$."a"[*]', NULL, 'so, so', '(1,"x y")',
    7, 12.50, '10:00:00+05:30', '{1,NULL,3}', '{"a,b","NULL",NULL,"q\"uo\\te",""," "}', '{1.500,NaN}',
    '{infinity,"2024-01-01 00:00:00+00"}', '{{1,2},{3,4}}', '{"\\x00","\\xff"}', '{"{\"a\": [1]}","[1, 2]",NULL}',
    '{sad,"so, so"}', '{(2,2),(0,0);(1,1),(0,0)}', '{t,f,NULL}', '{"[1,5)",empty}', '{abc,d}', '{kinds}'
), (
    2, 0, 0, 'NaN', '-Infinity', 'NaN', 'Infinity', false, '', '', '', '', '', '', 'infinity', '24:00', '23:59:59.999',
    '00:00:00-15', '-infinity', 'infinity', '00000000-0000-0000-0000-000000000002', '1 year -2 mons +3 days 04:05:06',
    '0', '"text"', '"text"', '::1', '::/0', 'ff:ff:ff:ff:ff:ff', '00000', '', '-1', '', '''a b''', '(0,-1e300)',
    '((0,0))', '(1,1),(1,1)', 'empty', '(,)', '{}', '0/0', '0', 0, NULL, 'strict $', NULL, 'happy', '(,)',
    -1, 0, '00:00:00+00', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}'
);
INSERT INTO kinds (id, small, big, real4, real8, exact, free, words, short, fixed, one, called, raw, day, clock, clock3,
                   zoned, moment, at_zone, uid, span, span2, doc, docb) VALUES (
    3, 32767, -9223372036854775808, '-Infinity', '1e-300', -0.01, '0.000000000000000000000000000000000001', ' ', ' ',
    ' x', 'y', 'mixed "Case"', '\x', '0044-03-15 BC', '00:00', '0:00', '12:00+00', '0044-03-15 10:00:00 BC',
    '294276-12-31 23:59:59.999999+00', 'ffffffff-ffff-ffff-ffff-ffffffffffff', '178000000 years', '-3 days', '[]', '{}'
);
INSERT INTO kinds (id, day, moment, at_zone) VALUES
    (4, '12345-06-07', '12345-06-07 08:09:10', '0001-12-31 23:59:59 BC'),
    (5, '0001-01-01', '0001-01-01', '0999-01-01 00:00+00');
"""

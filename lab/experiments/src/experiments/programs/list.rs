//! The programs of the experiment `programs`: shell scripts with an input of their own. Each prints
//! the same on every run.

use crate::rig::script::{SORT_COMMAND, SORT_LINES, SORT_PREPARE};

/// A program. Its scripts get `$1` (a size) and run in a folder of their own.
pub(super) struct Program {
    pub name: &'static str,
    /// Commands that must be installed.
    pub needs: &'static [&'static str],
    /// `$1` for a small run, and for a real one.
    pub sizes: [u32; 2],
    /// Makes the input, once.
    pub prepare: &'static str,
    /// The command that is measured. Its output has only what does not vary.
    pub command: &'static str,
}

/// A map that is filled, read in another order, and sorted.
const JAVA: &str = r#"cat > W.java <<'END'
import java.util.*;
class W {
    public static void main(String[] a) {
        int n = Integer.parseInt(a[0]);
        HashMap<Integer, String> m = new HashMap<>();
        for (int i = 0; i < n; i++) m.put((int) (i * 7919L % 1000003), "value " + i);
        long s = 0;
        for (int i = 0; i < n; i++) {
            String v = m.get((int) (i * 104729L % 1000003));
            if (v != null) s = s * 31 + v.length();
        }
        for (var e : new TreeMap<>(m).entrySet()) s = s * 31 + e.getKey();
        System.out.println(s);
    }
}
END
javac W.java"#;

/// A text of 20,000 words, two a line.
const TEXT: &str = r#"python3 -c 'import random, sys
random.seed(3); words = ["%x" % random.getrandbits(40) for _ in range(20000)]
for _ in range(int(sys.argv[1])): print(random.choice(words), random.choice(words))' "$1" > text"#;

/// A client of redis and memcached: it fills the server, and checks values of a Zipf-like order.
const CLIENT: &str = r#"cat > client.py <<'END'
import random, socket, sys, time
kind, n = sys.argv[1], int(sys.argv[2])
for _ in range(3000):
    try:
        s = socket.socket(socket.AF_UNIX); s.connect("socket"); break
    except OSError:
        time.sleep(0.01)
f = s.makefile("rwb")
def value(i): return b"%032x" % random.Random(i).getrandbits(128) * 30
def put(i, v):
    if kind == "redis":
        f.write(b"*3\r\n$3\r\nSET\r\n$%d\r\n%d\r\n$%d\r\n%s\r\n" % (len(str(i)), i, len(v), v))
        f.flush(); f.readline()
    else:
        f.write(b"set %d 0 0 %d noreply\r\n%s\r\n" % (i, len(v), v))
def get(i):
    if kind == "redis":
        f.write(b"*2\r\n$3\r\nGET\r\n$%d\r\n%d\r\n" % (len(str(i)), i)); f.flush()
        size = int(f.readline()[1:])
    else:
        f.write(b"get %d\r\n" % i); f.flush()
        size = int(f.readline().split()[3])
    v = f.read(size); f.readline()
    if kind != "redis": f.readline()
    return v
for i in range(n): put(i, value(i))
r, wrong = random.Random(7), 0
for _ in range(2 * n):
    i = int(n * r.random() ** 4)
    wrong += get(i) != value(i)
print(n, "values,", wrong, "wrong")
if kind == "redis": f.write(b"*2\r\n$8\r\nSHUTDOWN\r\n$6\r\nNOSAVE\r\n"); f.flush()
END"#;

pub(super) const PROGRAMS: &[Program] = &[
    Program {
        name: "sort",
        needs: &["sort", "python3"],
        sizes: [20_000, SORT_LINES],
        prepare: SORT_PREPARE,
        command: SORT_COMMAND,
    },
    Program {
        name: "gcc",
        needs: &["gcc", "python3"],
        sizes: [50, 1_500],
        prepare: r#"python3 -c 'import sys
for i in range(int(sys.argv[1])):
    print(f"int f{i}(int a,int*b){{int s=0;for(int i=0;i<a;i++)s+=b[i]*{i}^(s>>{i%7+1});return s;}}")' "$1" > big.c"#,
        command: "told gcc -O2 -S -o - big.c | cksum",
    },
    Program {
        name: "sqlite-join",
        needs: &["sqlite3"],
        sizes: [5_000, 400_000],
        prepare: "true",
        command: r#"sqlite3 :memory: "PRAGMA temp_store=MEMORY;
WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c WHERE x<$1) SELECT count(x) FROM c;
CREATE TABLE t AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c WHERE x<$1)
    SELECT x*7919%1000003 AS a, hex(x) AS b FROM c;
CREATE TABLE u AS SELECT a*3%1000003 AS a, b FROM t;
CREATE INDEX i ON t(a);
SELECT count(*), sum(length(t.b)+length(u.b)) FROM u JOIN t ON t.a=u.a;""#,
    },
    Program {
        name: "numpy",
        needs: &["python3"],
        sizes: [100_000, 8_000_000],
        prepare: "/usr/bin/python3 -c 'import numpy'",
        command: r#"/usr/bin/python3 -c 'import sys, numpy as np
n = int(sys.argv[1]); r = np.random.RandomState(2)
a = r.randint(0, 1 << 30, n); b = np.sort(a); p = r.permutation(n)
print(int(b[p].sum()), int(np.bincount(a % 1009)[7]), int((a[p][:: 3] ^ b[:: 3]).sum()))' "$1""#,
    },
    Program {
        name: "python-dict",
        needs: &["python3"],
        sizes: [5_000, 700_000],
        prepare: "true",
        command: r#"python3 -c 'import sys, zlib
n = int(sys.argv[1]); d = {(i * 7919) % 1000003: str(i) * 3 for i in range(n)}
s = 0
for i in range(n): s = (s * 31 + len(d.get((i * 104729) % 1000003, ""))) % 1000000007
print(s, zlib.crc32("".join(d[k] for k in sorted(d)).encode()))' "$1""#,
    },
    Program {
        name: "perl-hash",
        needs: &["perl"],
        sizes: [5_000, 500_000],
        prepare: "true",
        command: r#"perl -e '$n = shift; $h{$_ * 7919 % 1000003} .= "x$_" for 1..$n;
for (sort { $a <=> $b } keys %h) { $s = ($s * 31 + length $h{$_}) % 1000000007 } print "$s\n"' "$1""#,
    },
    Program {
        name: "java-serial",
        needs: &["java", "javac"],
        sizes: [20_000, 900_000],
        prepare: JAVA,
        command: r#"java -XX:+UseSerialGC -Xms16m -Xmx512m -cp . W "$1""#,
    },
    Program {
        name: "java-g1",
        needs: &["java", "javac"],
        sizes: [20_000, 900_000],
        prepare: JAVA,
        command: r#"java -XX:+UseG1GC -Xms16m -Xmx512m -cp . W "$1""#,
    },
    Program {
        name: "node-map",
        needs: &["node"],
        sizes: [5_000, 900_000],
        prepare: "true",
        command: r#"node -e 'const n = +process.argv[1], m = new Map();
for (let i = 0; i < n; i++) m.set((i * 7919) % 1000003, { i, t: "v" + i });
let s = 0;
for (let i = 0; i < n; i++) { const o = m.get((i * 104729) % 1000003); if (o) s = (s * 31 + o.t.length) | 0; }
const a = [...m.values()].sort((p, q) => q.t.length - p.t.length || p.i - q.i);
console.log(s, a.slice(0, 9).map(o => o.i).join());' "$1""#,
    },
    Program {
        name: "imagemagick",
        needs: &["convert"],
        sizes: [300, 3_000],
        prepare: "true",
        command: r#"told convert -size "$1x$1" gradient:red-blue -swirl 90 -blur 0x2 -rotate 31 \
  -resize 30% rgb:- | cksum"#,
    },
    Program {
        name: "zstd-long",
        needs: &["zstd", "python3"],
        sizes: [20_000, 1_500_000],
        prepare: TEXT,
        command: "told zstd -q -12 -T1 --long=26 -c text | cksum",
    },
    Program {
        name: "xz",
        needs: &["xz", "python3"],
        sizes: [20_000, 500_000],
        prepare: TEXT,
        command: "told xz -4 -T1 -c text | cksum",
    },
    Program {
        name: "redis",
        needs: &["redis-server", "python3"],
        sizes: [10_000, 60_000],
        prepare: CLIENT,
        command: r#"redis-server --port 0 --unixsocket "$PWD/socket" --save '' --appendonly no \
    --daemonize no --logfile /dev/null & python3 client.py redis "$1"; wait"#,
    },
    Program {
        name: "memcached",
        needs: &["memcached", "python3"],
        sizes: [10_000, 60_000],
        prepare: CLIENT,
        command: r#"memcached -u root -s "$PWD/socket" -m 512 -t 2 -U 0 2>/dev/null & server=$!
python3 client.py memcached "$1"; kill -9 $server; wait 2>/dev/null; true"#,
    },
];

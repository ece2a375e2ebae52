package cli

import (
	"bytes"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/caddymodule/admin"
)

// What callers choose cannot give orders to an operator's terminal, nor pretend to be
// something else on it.
func TestPrintable(t *testing.T) {
	for text, want := range map[string]string{
		"":                     "",
		"/v1/charges?x=1":      "/v1/charges?x=1",
		"naïve 日本":             "naïve 日本",
		"\x1b[2J\x1b]0;evil\a": `"\x1b[2J\x1b]0;evil\a"`,
		"a\nb\tc\x00":          `"a\nb\tc\x00"`,
		"c1\u009b31m":          `"c1\u009b31m"`,
		"rtl\u202egnp.exe":     `"rtl\u202egnp.exe"`,
		"\xff\xfe":             `"\xff\xfe"`,
		"zero\u200bwidth":      `"zero\u200bwidth"`,
	} {
		if got := printable(text); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

func TestHumanUnits(t *testing.T) {
	for seconds, want := range map[int64]string{
		0: "0s", 59: "59s", 60: "1m", 3599: "59m", 3600: "1h", 172799: "47h", 172800: "2d", 86400 * 400: "400d",
	} {
		if got := ago(seconds); got != want {
			t.Errorf("%d seconds: %s, want %s", seconds, got, want)
		}
	}
	for bytes, want := range map[uint64]string{
		0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 5 << 20: "5.0 MiB", 3 << 30: "3.0 GiB", 1 << 50: "1024.0 TiB",
	} {
		if got := size(bytes); got != want {
			t.Errorf("%d bytes: %s, want %s", bytes, got, want)
		}
	}
	now := time.Date(2026, 11, 20, 14, 0, 0, 0, time.UTC)
	for want, at := range map[string]time.Time{
		"":                              {},
		"2026-11-20T13:00:00Z (1h ago)": now.Add(-time.Hour),
		"2026-11-20T14:00:30Z (in 30s)": now.Add(30 * time.Second),
		"2026-11-20T14:00:00Z (0s ago)": now,
		"2026-12-20T14:00:00Z (in 30d)": now.AddDate(0, 1, 0),
		"2026-11-20T13:59:59Z (1s ago)": now.Add(-time.Second).In(time.FixedZone("", 7200)),
	} {
		if got := moment(at, now); got != want {
			t.Errorf("%v: %q, want %q", at, got, want)
		}
	}
	if got := cut("日本語です", 3); got != "日本…" {
		t.Errorf("cut to %q", got)
	}
}

// Columns of later pages stand below those of earlier ones, where they fit.
func TestTablePages(t *testing.T) {
	var out bytes.Buffer
	table := table{out: &out}
	for _, rows := range [][][]string{
		{{"a", "b", "c"}, {"日本語", "b", "c"}}, {{"x", "long", "y"}}, {{"x", "y", "z"}},
	} {
		if err := table.print([]string{"A", "B", "C"}, rows); err != nil {
			t.Fatal(err)
		}
	}
	want := "A    B  C\na    b  c\n日本語  b  c\nx    long  y\nx    y     z\n"
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", &out, want)
	}
}

// Section "CLI": what is said of keys, in every state that they can be in.
func TestPrintKeys(t *testing.T) {
	now := time.Date(2026, 11, 20, 14, 0, 0, 0, time.UTC)
	status := &admin.KeyStatus{Source: "file", File: "/data/guard.key", Keys: []admin.Key{
		{ID: 1, Created: now.AddDate(0, -6, 0)},
		{ID: 2, Created: now.AddDate(0, -1, 0), InUse: true, Until: now.Add(5 * time.Hour)},
		{ID: 3, Created: now.Add(-time.Minute), Newest: true, InUse: true},
	}, Resealing: &admin.Resealing{
		Key: 3, Seen: 10, Resealed: 7, Damaged: 1, Done: true, Finished: now.Add(-time.Second), Left: []admin.KeyLeft{{ID: 2, Records: 1, Results: 2}},
	}}
	var out bytes.Buffer
	if err := printKeys(&out, status, now); err != nil {
		t.Fatal(err)
	}
	want := `The key ring is in /data/guard.key.
KEY  USE     CREATED                          NEEDED UNTIL
1    unused  2026-05-20T14:00:00Z (184d ago)  -
2    opens   2026-10-20T14:00:00Z (31d ago)   2026-11-20T19:00:00Z (in 5h)
3    seals   2026-11-20T13:59:00Z (1m ago)    -
Re-sealing to key 3: done, 2026-11-20T13:59:59Z (1s ago); 10 values seen, 7 sealed anew, 1 damaged.
Key 2 still has 1 records and 2 parts of answers.
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", &out, want)
	}
	for want, r := range map[string]*admin.Resealing{
		"Re-sealing to key 2: running; 3 values seen, 0 sealed anew, 0 damaged.":                                     {Key: 2, Seen: 3},
		"Re-sealing to key 2: stopped, and will be tried again: disk full; 0 values seen, 0 sealed anew, 0 damaged.": {Key: 2, Error: "disk full"},
	} {
		if got := describeResealing(r, now); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	out.Reset()
	if err := printKeys(&out, &admin.KeyStatus{Source: "value"}, now); err != nil || !bytes.Contains(out.Bytes(), []byte("given as a value")) {
		t.Errorf("%v %s", err, &out)
	}
}

package ect

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"maps"
	"math/big"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/internal/durable"
)

// TestSameSignature: the signatures of ECDSA are those of RFC 6979, appendix A.2.5 and
// A.2.6, so that a token that is signed again has the same bytes.
func TestSameSignature(t *testing.T) {
	for _, c := range []struct {
		algorithm Algorithm
		curve     elliptic.Curve
		key, want string
	}{
		{
			ES256, elliptic.P256(), "c9afa9d845ba75166b5c215767b1d6934e50c3db36e89b127b8a622b120f6721",
			"efd48b2aacb6a8fd1140dd9cd45e81d69d2c877b56aaf991c34d0ea84eaf3716" +
				"f7cb1c942d657c41d436c7a1b6e29f65f3e900dbb9aff4064dc4ab2f843acda8",
		},
		{
			ES384, elliptic.P384(), "6b9d3dad2e1b8c1c05b19875b6659f4de23c3b667bf297ba9aa47740787137d896d5724e4c70a825f872c9ea60d2edf5",
			"94edbb92a5ecb8aad4736e56c691916b3f88140666ce9fa73d64c4ea95ad133c81a648152e44acf96e36dd1e80fabe46" +
				"99ef4aeb15f178cea1fe40db2603138f130e740a19624526203b6351d0a3a94fa329c145786e679e7b82c71a38628ac8",
		},
	} {
		secret, err := hex.DecodeString(c.key)
		if err != nil {
			t.Fatal(err)
		}
		private, err := ecdsa.ParseRawPrivateKey(c.curve, secret)
		if err != nil {
			t.Fatal(err)
		}
		raw, err := c.algorithm.sign(private, []byte("sample"))
		if err != nil || hex.EncodeToString(raw) != c.want {
			t.Errorf("%s: %x, %v", c.algorithm, raw, err)
		}
	}
}

// TestShortSignatures: a signature whose r or s begins with a zero octet, as one in 128
// does, has the same length and verifies; zeros and numbers over the order do not.
func TestShortSignatures(t *testing.T) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	short := false
	for n := range 2000 {
		text := []byte(strconv.Itoa(n))
		raw, err := ES256.sign(private, text)
		if err != nil || len(raw) != 64 {
			t.Fatalf("%d octets, %v", len(raw), err)
		}
		if raw[0] != 0 && raw[32] != 0 {
			continue
		}
		short = true
		if !ES256.verify(&private.PublicKey, text, raw) {
			t.Fatalf("%x does not hold", raw)
		}
		break
	}
	if !short {
		t.Error("no signature had a leading zero")
	}
	zero := make([]byte, 64)
	if ES256.verify(&private.PublicKey, []byte("text"), zero) {
		t.Error("a signature of zeros holds")
	}
	order := private.Params().N.FillBytes(make([]byte, 32))
	if ES256.verify(&private.PublicKey, []byte("text"), append(order, new(big.Int).SetInt64(1).FillBytes(make([]byte, 32))...)) {
		t.Error("a signature over the order holds")
	}
}

// TestBusy: a rotation in another process is not waited for.
func TestBusy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ect.jwks")
	ring, err := CreateRing(path, EdDSA)
	if err != nil {
		t.Fatal(err)
	}
	lock, err := durable.Lock(path + ".lock")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ring.Rotate(path, EdDSA, time.Now(), time.Minute); !errors.Is(err, ErrBusy) {
		t.Errorf("got %v", err)
	}
	lock.Close()
	if _, err := ring.Rotate(path, EdDSA, time.Now(), time.Minute); err != nil {
		t.Error(err)
	}
}

// TestTables: no name in a vocabulary stands for two events or two members, and every
// member that an event needs is in the table.
func TestTables(t *testing.T) {
	seen := make(map[string]bool)
	claim := func(name string) {
		if name == "" {
			return
		}
		if seen[name] && name != closingCooldown {
			t.Errorf("%s stands twice", name)
		}
		seen[name] = true
	}
	for _, row := range eventTable {
		for _, name := range []string{string(row.event), row.atd, row.aerr, row.also} {
			claim(name)
		}
		for _, m := range row.needs {
			if _, ok := memberRows[string(m)]; !ok {
				t.Errorf("%s needs %s, which is in no table", row.event, m)
			}
		}
	}
	for _, row := range memberTable {
		for _, name := range []string{string(row.member), row.atd, row.aerr} {
			claim(name)
		}
	}
}

// TestTable2Kinds: the types of Table 2 of the cascade draft are those of ours.
func TestTable2Kinds(t *testing.T) {
	want := map[kind][]Member{
		boolKind: {"cascade.reversible"},
		numberKind: {
			"cascade.error_rate", "cascade.window_s", "cascade.cooldown_s", "cascade.ttl", "cascade.affected_agents",
		},
		listKind: {"cascade.blast_radius", "cascade.cascaded", "cascade.failed_agents"},
		textKind: {
			"cascade.downstream_agent", "cascade.rollback_uri", "cascade.target", "cascade.rollback_id", "cascade.checkpoint_id",
			"cascade.scope", "cascade.status", "cascade.reason", "cascade.pattern", "cascade.state_hash_before",
			"cascade.state_hash_after", "cascade.description",
		},
	}
	for k, members := range want {
		for _, m := range members {
			if i, ok := memberRows[string(m)]; !ok || memberTable[i].kind != k {
				t.Errorf("%s has another type", m)
			}
		}
	}
}

// All returns the keys of the set, in no order.
func (s *Set) All() []*Key { return slices.Concat(slices.Collect(maps.Values(s.byID))...) }

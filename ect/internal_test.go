package ect

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"errors"
	"math/big"
	"path/filepath"
	"testing"
	"time"

	"github.com/agent-guard/caddy-agent-guard/internal/durable"
)

// TestSignatureForms: every raw signature becomes the DER that the standard library
// reads, and back, whatever zeros and high bits its integers begin with.
func TestSignatureForms(t *testing.T) {
	for _, size := range []int{32, 48} {
		for _, begin := range [][]byte{{0, 0, 0, 0}, {0, 0, 0x80, 1}, {0x80, 0, 0, 0}, {0x7f}, {0xff, 0xff}, {1}} {
			raw := make([]byte, 2*size)
			copy(raw, begin)
			copy(raw[size:], begin)
			raw[size-1], raw[2*size-1] = 1, 2
			der := toDER(nil, raw)
			if len(der) > maxDER {
				t.Errorf("%d octets", len(der))
			}
			back, err := fromDER(nil, der, size)
			if err != nil || !bytes.Equal(back, raw) {
				t.Errorf("%x became %x, %v", raw, back, err)
			}
		}
	}
	for _, wrong := range [][]byte{nil, {0x30}, {0x31, 0}, {0x30, 1, 2}, {0x30, 3, 2, 5, 1}, {0x30, 3, 3, 1, 1}, toDER(nil, bytes.Repeat([]byte{1}, 96))} {
		if out, err := fromDER(nil, wrong, 32); err == nil {
			t.Errorf("%x became %x", wrong, out)
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
	for range 2000 {
		raw, err := ES256.sign(nil, private, []byte("text"))
		if err != nil || len(raw) != 64 {
			t.Fatalf("%d octets, %v", len(raw), err)
		}
		if raw[0] != 0 && raw[32] != 0 {
			continue
		}
		short = true
		if !ES256.verify(&private.PublicKey, []byte("text"), raw) {
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

package store

import (
	"bytes"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
	"time"
)

var errBroken = errors.New("broken")

// The form of fields is that of all records since the first build.
func TestFieldsAreTagLengthBytes(t *testing.T) {
	e := Encoder{B: []byte("before")}
	e.String(1, "text")
	e.Bytes(2, []byte{0, 255})
	e.Int(3, -1)
	e.Int(4, 1<<40)
	e.Bool(5, true)
	e.Time(6, time.Unix(0, 300))
	e.String(7, strings.Repeat("x", 128))
	for _, zero := range []func(byte){
		func(tag byte) { e.String(tag, "") }, func(tag byte) { e.Bytes(tag, nil) }, func(tag byte) { e.Bytes(tag, []byte{}) },
		func(tag byte) { e.Int(tag, 0) }, func(tag byte) { e.Bool(tag, false) }, func(tag byte) { e.Time(tag, time.Time{}) },
	} {
		zero(8)
	}
	Field(&e, 9, "")
	Field(&e, 9, []byte("a"), nil, []byte("bc"))
	e.Time(255, time.Unix(0, 0).UTC()) // 1970 is as good as none
	want := hex.EncodeToString([]byte("before")) +
		"010474657874" + "020200ff" + "030101" + "0406808080808040" + "050102" + "0602d804" + "078001" + strings.Repeat("78", 128) + "0900" + "0903616263"
	if got := hex.EncodeToString(e.B); got != want {
		t.Errorf("%s, want\n%s", got, want)
	}
}

func TestDecoderReadsFields(t *testing.T) {
	var e Encoder
	e.Int(1, -300)
	e.Time(2, time.Unix(5, 7))
	Field(&e, 2, "four")
	Field(&e, 3, "")
	d := Decoder{B: e.B, Broken: errBroken}
	next := func(tag byte, raw string) {
		t.Helper()
		if !d.Next() || d.Tag != tag || string(d.Raw) != raw || !bytes.HasSuffix(d.Raw, d.Field) {
			t.Fatalf("%d, %q, %v", d.Tag, d.Raw, d.Err)
		}
	}
	next(1, "\x01\x02\xd7\x04")
	if v := d.Int(); v != -300 {
		t.Error(v)
	}
	next(2, string(d.B[:2+d.B[1]]))
	if v := d.Time(); !v.Equal(time.Unix(5, 7)) {
		t.Error(v)
	}
	next(2, "\x02\x04four")
	var four [4]byte
	if d.Fill(four[:]); string(four[:]) != "four" {
		t.Errorf("%q", four)
	}
	next(3, "\x03\x00")
	if d.Next() || d.Err != nil {
		t.Errorf("%v at the end", d.Err)
	}
}

// What a writer leaves out, a reader does not tell from what is there and empty: a record
// that was read is written as it was read.
func TestEmptyFieldsAreAsNone(t *testing.T) {
	d := Decoder{B: []byte("\x01\x00" + "\x02\x01\x00"), Broken: errBroken}
	if !d.Next() || d.Field != nil {
		t.Errorf("%#v, %v", d.Field, d.Err)
	}
	if !d.Next() || !d.Time().IsZero() || d.Err != nil {
		t.Errorf("%v, %v", d.Time(), d.Err)
	}
}

// The first fault ends the reading, with the error of the reader's own.
func TestDecoderStopsAtAFault(t *testing.T) {
	number := func(d *Decoder) { d.Int() }
	for name, c := range map[string]struct {
		b    string
		read func(*Decoder)
	}{
		"no length":         {"\x01", nil},
		"half a length":     {"\x01\x80", nil},
		"a length too long": {"\x01\x02a", nil},
		"an endless length": {"\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", nil},
		"a large length":    {"\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", nil},
		"no number":         {"\x01\x00\x02\x00", number},
		"half a number":     {"\x01\x01\x80\x02\x00", number},
		"two numbers":       {"\x01\x02\x04\x04\x02\x00", number},
		"too short":         {"\x01\x01a\x02\x00", func(d *Decoder) { d.Fill(make([]byte, 2)) }},
		"too long":          {"\x01\x03abc\x02\x00", func(d *Decoder) { d.Fill(make([]byte, 2)) }},
	} {
		d := Decoder{B: []byte(c.b), Broken: errBroken}
		if found := d.Next(); found != (c.read != nil) {
			t.Fatalf("%s: %v", name, found)
		}
		if c.read != nil {
			c.read(&d)
		}
		if d.Err != errBroken || d.Next() {
			t.Errorf("%s: %v", name, d.Err)
		}
	}
}

// What is read is what stands there: the fields one after the other, and nothing between.
func FuzzDecoder(f *testing.F) {
	f.Add([]byte("\x01\x02\xd7\x04\x02\x00\x03\x04four"))
	f.Add([]byte("\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"))
	f.Add([]byte("\x01\x81\x00a"))
	f.Fuzz(func(t *testing.T, b []byte) {
		d := Decoder{B: b, Broken: errBroken}
		var raw []byte
		for d.Next() {
			raw = append(raw, d.Raw...)
			var e Encoder
			Field(&e, d.Tag, d.Field)
			again := Decoder{B: e.B, Broken: errBroken}
			if !again.Next() || again.Tag != d.Tag || !bytes.Equal(again.Field, d.Field) || len(again.B) > 0 {
				t.Fatalf("%q became %q", d.Raw, e.B)
			}
			d.Fill(make([]byte, len(d.Field)))
		}
		if raw = append(raw, d.B...); !bytes.Equal(raw, b) || (len(d.B) > 0) != (d.Err != nil) {
			t.Errorf("%q was read as %q, %v", b, raw, d.Err)
		}
	})
}

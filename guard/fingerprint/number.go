package fingerprint

import (
	"bytes"
	"strconv"
)

// appendNumber appends the one text of the value that tok, a valid JSON number,
// stands for: an optional minus, the digits without zeros at either end, "e" and
// the exponent. It is exact for every length of digits and exponent, and takes no
// more memory than tok. Zero is "0", whatever its sign and exponent.
func appendNumber(dst, tok []byte) []byte {
	start := len(dst)
	if tok[0] == '-' {
		dst = append(dst, '-')
		tok = tok[1:]
	}
	var exp []byte
	if i := bytes.IndexAny(tok, "eE"); i >= 0 {
		tok, exp = tok[:i], tok[i+1:]
	}
	var frac int64
	first := len(dst)
	if i := bytes.IndexByte(tok, '.'); i >= 0 {
		frac = int64(len(tok) - i - 1)
		dst = append(dst, tok[:i]...)
		tok = tok[i+1:]
	}
	dst = append(dst, tok...)
	digits := bytes.TrimLeft(dst[first:], "0")
	if len(digits) == 0 {
		return append(dst[:start], '0')
	}
	dst = dst[:first+copy(dst[first:], digits)]
	short := bytes.TrimRight(dst[first:], "0")
	shift := int64(len(dst)-first-len(short)) - frac
	dst = append(dst[:first+len(short)], 'e')
	return appendExponent(dst, exp, shift)
}

// appendExponent appends exp + shift in decimal. exp may have more digits than
// any integer type; |shift| is at most maxNumber.
func appendExponent(dst, exp []byte, shift int64) []byte {
	neg := false
	if len(exp) > 0 && (exp[0] == '-' || exp[0] == '+') {
		neg = exp[0] == '-'
		exp = exp[1:]
	}
	exp = bytes.TrimLeft(exp, "0")
	if len(exp) <= 18 {
		var e int64
		for _, c := range exp {
			e = e*10 + int64(c-'0')
		}
		if neg {
			e = -e
		}
		return strconv.AppendInt(dst, e+shift, 10)
	}
	// At least 10^18 in size: shift changes neither the sign nor, but for a
	// carry, more than the last digits.
	if neg {
		dst = append(dst, '-')
		shift = -shift
	}
	from := len(dst)
	dst = append(append(dst, '0'), exp...)
	carry := shift
	for i := len(dst) - 1; carry != 0; i-- {
		v := int64(dst[i]-'0') + carry
		d := v % 10
		if d < 0 {
			d += 10
		}
		dst[i] = byte('0' + d)
		carry = (v - d) / 10
	}
	return dst[:from+copy(dst[from:], bytes.TrimLeft(dst[from:], "0"))]
}

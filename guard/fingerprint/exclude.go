package fingerprint

import (
	"bytes"
	"crypto/sha256"
)

// follow gives the exclusions that lead further, through the member with the
// given encoded name or, with a nil name, through the array element i, and
// whether one of them ends there.
func (c *canon) follow(live []int32, depth int, name []byte, i int64) (below []int32, drop bool) {
	from := len(c.live)
	for _, x := range live {
		tokens := c.exclude[x].tokens
		if len(tokens) <= depth {
			continue
		}
		if name != nil {
			if !named(name, tokens[depth]) {
				continue
			}
		} else if n, ok := index(tokens[depth]); !ok || n != i {
			continue
		}
		drop = drop || len(tokens) == depth+1
		c.live = append(c.live, x)
	}
	return c.live[from:len(c.live):len(c.live)], drop
}

// named reports whether the encoded name is that of token.
func named(name []byte, token string) bool {
	if len(token) <= maxInline {
		return name[0] == tagString && string(name[2:]) == token
	}
	if name[0] == tagString {
		return false
	}
	sum := sha256.Sum256([]byte(token))
	return bytes.Equal(sum[:], name[1:])
}

package seal_test

import (
	"fmt"

	"github.com/agent-guard/caddy-agent-guard/guard/seal"
)

// A value opens under the name that it was sealed for, and nowhere else.
func ExampleRing_Seal() {
	ring := seal.Generate()
	sealed := ring.Seal(nil, []byte("4200 EUR"), []byte("x/1"))

	plain, err := ring.Open(nil, sealed, []byte("x/1"))
	fmt.Println(string(plain), err)
	_, err = ring.Open(nil, sealed, []byte("x/2"))
	fmt.Println(err == seal.ErrOpen)
	// Output:
	// 4200 EUR <nil>
	// true
}

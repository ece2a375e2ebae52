package e2e

import (
	"flag"
	"os"
	"testing"
)

// TestMain has more tests run side by side than there are processors: those that may mostly wait.
func TestMain(m *testing.M) {
	flag.Parse()
	explicit := false
	flag.Visit(func(f *flag.Flag) { explicit = explicit || f.Name == "test.parallel" })
	if !explicit {
		if err := flag.Set("test.parallel", "4"); err != nil {
			panic(err)
		}
	}
	code := m.Run()
	if *recordWire {
		if err := saveWire(); err != nil {
			panic(err)
		}
	}
	os.Exit(code)
}

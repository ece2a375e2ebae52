package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// ProcUse is what a gateway holds, the files of its store left out.
type ProcUse struct{ Goroutines, Files int }

var procTotal = regexp.MustCompile(`goroutine profile: total (\d+)`)

// Use measures what the gateway holds of the system.
func (g *ProcGateway) Use(t *testing.T) ProcUse {
	t.Helper()
	_, text, err := g.Admin("GET", "/debug/pprof/goroutine?debug=1", "", "")
	if err != nil {
		t.Fatal(err)
	}
	total := procTotal.FindStringSubmatch(text)
	if total == nil {
		t.Fatalf("no goroutine profile: %.200s", text)
	}
	goroutines, _ := strconv.Atoi(total[1])
	dir := fmt.Sprintf("/proc/%d/fd", g.Cmd.Process.Pid)
	handles, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	files := 0
	for _, h := range handles {
		// The store has as many tables as it needs.
		if name, err := os.Readlink(filepath.Join(dir, h.Name())); err == nil && !strings.HasPrefix(name, g.Site.Path("data/")) {
			files++
		}
	}
	return ProcUse{goroutines, files}
}

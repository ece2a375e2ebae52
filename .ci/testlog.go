//go:build ignore

// Command testlog reads `go test -json` on its standard input and prints what plain
// `go test` would: a line for every package, and everything a failed test said. It
// fails where a test was skipped or where none ran at all, which go test takes for
// a success. A failed test is go test's own exit status to report.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"
)

// event is one line of test2json, or of the build that came before.
type event struct {
	Action  string
	Package string
	Test    string
	Output  string
}

// log gathers what tests print until it is known whether they passed.
type log struct {
	output                  map[string]*strings.Builder // by package and test
	passed, failed, skipped int
	skips, fails            []string
}

func main() {
	l := &log{output: make(map[string]*strings.Builder)}
	lines := bufio.NewReader(os.Stdin)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			l.take(line)
		}
		if err != nil {
			break
		}
	}
	for _, fail := range l.fails {
		fmt.Println(fail)
	}
	fmt.Printf("%d passed, %d failed, %d skipped\n", l.passed, l.failed, l.skipped)
	for _, name := range l.skips {
		fmt.Println("skipped:", name)
	}
	switch {
	case l.skipped > 0:
		fmt.Println("a skipped test proves nothing; make it run or remove it")
		os.Exit(1)
	case l.passed+l.failed == 0:
		fmt.Println("no test ran")
		os.Exit(1)
	}
}

func (l *log) take(line []byte) {
	var e event
	if json.Unmarshal(line, &e) != nil {
		os.Stdout.Write(line) // go itself speaking
		return
	}
	name := e.Package + " " + e.Test
	switch e.Action {
	case "output":
		if e.Test == "" {
			if !noise(e.Output) {
				fmt.Print(e.Output)
			}
			return
		}
		if l.output[name] == nil {
			l.output[name] = new(strings.Builder)
		}
		l.output[name].WriteString(e.Output)
	case "build-output":
		fmt.Print(e.Output)
	case "pass", "fail", "skip":
		l.end(e, name)
	}
}

// noise is what go test says of a package without saying anything.
func noise(line string) bool {
	return line == "PASS\n" || line == "FAIL\n" ||
		strings.Contains(line, "no tests to run") || strings.HasSuffix(line, "[no test files]\n")
}

// end counts one finished test and prints it if it failed. Of a package that fails,
// what its unfinished tests said is printed too: it holds the panic or the timeout.
func (l *log) end(e event, name string) {
	if e.Test == "" {
		for key, said := range l.output {
			if strings.HasPrefix(key, name) {
				if e.Action == "fail" {
					fmt.Print(said)
				}
				delete(l.output, key)
			}
		}
		return
	}
	switch e.Action {
	case "pass":
		l.passed++
	case "skip":
		l.skipped++
		l.skips = append(l.skips, name)
	case "fail":
		l.failed++
		l.fails = append(l.fails, "failed: "+name)
		if said := l.output[name]; said != nil {
			fmt.Print(said)
			l.fails = append(l.fails, messages(said.String())...)
		}
	}
	delete(l.output, name)
}

var message = regexp.MustCompile(`^\s+\w+\.go:\d+: `)

// messages are the beginnings of what a test has reported or logged, once more for the end, since logs of
// processes can be long.
func messages(said string) (all []string) {
	for line := range strings.Lines(said) {
		if message.MatchString(line) && len(all) < 30 {
			line = strings.TrimRight(line, "\n")
			all = append(all, line[:min(len(line), 300)])
		}
	}
	return all
}

package cli

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// word is a flag that takes one of some words.
type word struct {
	value *string
	words []string
}

// String implements pflag.Value.
func (w *word) String() string { return *w.value }

// Type implements pflag.Value.
func (w *word) Type() string { return "word" }

// Set implements pflag.Value.
func (w *word) Set(text string) error {
	if err := known(text, w.words); err != nil {
		return err
	}
	*w.value = text
	return nil
}

// words is a flag that takes some of some words, with commas or several times.
type words struct {
	values *[]string
	words  []string
}

// String implements pflag.Value.
func (w *words) String() string { return strings.Join(*w.values, ",") }

// Type implements pflag.Value.
func (w *words) Type() string { return "words" }

// Set implements pflag.Value.
func (w *words) Set(text string) error {
	for one := range strings.SplitSeq(text, ",") {
		if err := known(one, w.words); err != nil {
			return err
		}
		*w.values = append(*w.values, one)
	}
	return nil
}

func known(text string, words []string) error {
	if slices.Contains(words, text) {
		return nil
	}
	last := len(words) - 1
	return fmt.Errorf("use %s or %s", strings.Join(words[:last], ", "), words[last])
}

// complete offers words for a flag; without any, nothing, not even names of files.
func complete(cmd *cobra.Command, flag string, words ...string) {
	offer := func(_ *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
		begun, _ := splitLast(typed)
		var all []string
		for _, w := range words {
			all = append(all, begun+w)
		}
		return all, cobra.ShellCompDirectiveNoFileComp
	}
	if err := cmd.RegisterFlagCompletionFunc(flag, offer); err != nil {
		panic(err) // the flag is not there: a mistake in this package
	}
}

// splitLast parts a list at its last comma, which stays with the first part.
func splitLast(list string) (begun, last string) {
	i := strings.LastIndexByte(list, ',') + 1
	return list[:i], list[i:]
}

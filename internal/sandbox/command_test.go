package sandbox

import (
	"slices"
	"testing"
)

// Semantics 5.4, "Split details".
func TestSplitWords(t *testing.T) {
	t.Parallel()
	for line, want := range map[string][]string{
		"":                        nil,
		" \t\n ":                  nil,
		"a  b\tc\nd":              {"a", "b", "c", "d"},
		"a #b c":                  {"a"},
		"a #b\nc":                 {"a", "c"},
		"#":                       nil,
		"a#b c#":                  {"a#b", "c#"},
		"''#a":                    {"#a"},
		"a ''":                    {"a", ""},
		`a "" b`:                  {"a", "", "b"},
		"x='1 2'":                 {"x=1 2"},
		`x"1 2"'3 4'5`:            {"x1 23 45"},
		`'a\b"c'`:                 {`a\b"c`},
		`"a\b\"\\\$\` + "`" + `"`: {`a\b"\$` + "`"},
		`a\ b \'c\#`:              {"a b", "'c#"},
		"a\\\nb \"c\\\nd\"":       {"ab", "cd"},
		"a\u00a0b\u3000c":         {"a\u00a0b\u3000c"},
		"a\rb\vc\fd":              {"a\rb\vc\fd"},
		"$HOME ~ * ; | && > `x`":  {"$HOME", "~", "*", ";", "|", "&&", ">", "`x`"},
		"\xff \x00":               {"\xff", "\x00"},
	} {
		if got, ok := splitWords(line); !ok || !slices.Equal(got, want) {
			t.Errorf("%q: %q %v, want %q", line, got, ok, want)
		}
	}
	for _, line := range []string{`'`, `"`, `\`, `a 'b`, `a "b\"`, `a\`, `"\`, `# '` + "\n" + `"`} {
		if got, ok := splitWords(line); ok {
			t.Errorf("%q was split: %q", line, got)
		}
	}
}

func FuzzSplitWords(f *testing.F) {
	f.Add(`a 'b c' "d\"e" \ f # g`)
	f.Fuzz(func(t *testing.T, line string) {
		words, ok := splitWords(line)
		if !ok {
			return
		}
		// What was split comes back when each word is quoted.
		quoted := ""
		for _, word := range words {
			quoted += "'"
			for _, c := range []byte(word) {
				if c == '\'' {
					quoted += `'\''`
				} else {
					quoted += string([]byte{c})
				}
			}
			quoted += "' "
		}
		if again, ok := splitWords(quoted); !ok || !slices.Equal(again, words) {
			t.Errorf("%q: %q and then %q", line, words, again)
		}
	})
}

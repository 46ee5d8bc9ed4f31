package rexp_test

import (
	"bytes"
	"errors"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/agent/rexp"
)

// rustCase is one line of testdata/rust.tsv, which records what Rust's own
// engine answered, for patterns picked by hand and for random ones.
type rustCase struct {
	pattern, text, replacement, verdict, replaced string
}

func rustCases(t testing.TB) []rustCase {
	t.Helper()
	data, err := os.ReadFile("testdata/rust.tsv")
	if err != nil {
		t.Fatal(err)
	}
	var cases []rustCase
	for line := range strings.Lines(string(data)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		for _, i := range []int{0, 1, 2, 4} {
			if fields[i], err = strconv.Unquote(fields[i]); err != nil {
				t.Fatalf("%s: %v", line, err)
			}
		}
		cases = append(cases, rustCase{fields[0], fields[1], fields[2], fields[3], fields[4]})
	}
	if len(cases) < 1000 {
		t.Fatalf("only %d cases", len(cases))
	}
	return cases
}

func TestRegexp_AgreesWithRust(t *testing.T) {
	t.Parallel()
	matched, refused := 0, 0
	for _, c := range rustCases(t) {
		re, err := rexp.Compile(c.pattern, rexp.Options{})
		if err != nil {
			var e *rexp.Error
			if !errors.As(err, &e) {
				t.Errorf("%q: error of type %T", c.pattern, err)
			}
			if c.verdict != "error" && !strings.Contains(err.Error(), "not supported") {
				t.Errorf("%q: refused (%v), Rust takes it", c.pattern, err)
			}
			refused++
			continue
		}
		if c.verdict == "error" {
			t.Errorf("%q: accepted, Rust refuses it", c.pattern)
			continue
		}
		if got := re.Match([]byte(c.text)); got != (c.verdict == "match") {
			t.Errorf("%q on %q: match %v, Rust says %s", c.pattern, c.text, got, c.verdict)
		}
		if got := re.MatchReader(strings.NewReader(c.text)); got != (c.verdict == "match") {
			t.Errorf("%q on %q: reader match %v, Rust says %s", c.pattern, c.text, got, c.verdict)
		}
		var b bytes.Buffer
		if _, err := re.Replace(&b, []byte(c.text), re.Template(c.replacement), false); err != nil {
			t.Fatal(err)
		}
		if b.String() != c.replaced {
			t.Errorf("%q on %q with %q: %q, Rust gives %q", c.pattern, c.text, c.replacement, b.String(), c.replaced)
		}
		matched++
	}
	if matched < 500 || refused < 300 {
		t.Errorf("%d taken and %d refused: the cases are lopsided", matched, refused)
	}
}

func compile(t testing.TB, pattern string, opts rexp.Options) *rexp.Regexp {
	t.Helper()
	re, err := rexp.Compile(pattern, opts)
	if err != nil {
		t.Fatalf("%q: %v", pattern, err)
	}
	return re
}

func replace(t testing.TB, re *rexp.Regexp, text string, template *rexp.Template, firstOnly bool) (string, int) {
	t.Helper()
	var b bytes.Buffer
	n, err := re.Replace(&b, []byte(text), template, firstOnly)
	if err != nil {
		t.Fatal(err)
	}
	return b.String(), n
}

func TestCompile_RefusesWhatCannotBeTranslated(t *testing.T) {
	t.Parallel()
	for _, pattern := range []string{
		`\b{start}a`, `a\b{end}`, `\b{start-half}`, `\b{end-half}`, `\<a`, `a\>`,
		`(?mR)^a`, `(?mR)a$`, `\b(?-u:\b)`, `\p{scx=Greek}`, `\p{Emoji}`, `\p{age=3.0}`, `\p{sc=Grek}`,
	} {
		_, err := rexp.Compile(pattern, rexp.Options{})
		if err == nil || !strings.Contains(err.Error(), "not supported") && !strings.Contains(err.Error(), "unsupported") {
			t.Errorf("%q: %v", pattern, err)
		}
	}
}

func TestCompile_BoundsWhatItBuilds(t *testing.T) {
	t.Parallel()
	for _, pattern := range []string{
		`a{4294967295}`, `(a{1000}){1000}`, `((\w{50}){50}){50}`, `(?:[\w&&[^a]]{2000}){40}`,
		strings.Repeat("(", 10000) + strings.Repeat(")", 10000), strings.Repeat("[", 10000),
		"a" + strings.Repeat("*", 10000), strings.Repeat("a", 200_000), strings.Repeat("a|", 200_000),
		strings.Repeat(`\w`, 20_000), strings.Repeat(`\PL|`, 15_000), strings.Repeat(`[\w&&\pL]`, 5000),
	} {
		if _, err := rexp.Compile(pattern, rexp.Options{}); err == nil {
			t.Errorf("%.40q: accepted", pattern)
		}
	}
	if _, err := rexp.Compile("a\xff", rexp.Options{}); err == nil {
		t.Error("a pattern that is not UTF-8 was accepted")
	}
}

func TestCompile_LargeRepetitionsCountExactly(t *testing.T) {
	t.Parallel()
	for pattern, bounds := range map[string][2]int{
		`\Aa{1001}\z`: {1001, 1001}, `\A(?:a{40}){40}\z`: {1600, 1600}, `\Aa{1001,}\z`: {1001, 5000},
		`\Aa{3,2500}\z`: {3, 2500}, `\A(a{1500})\z`: {1500, 1500},
	} {
		re := compile(t, pattern, rexp.Options{})
		for _, n := range []int{bounds[0] - 1, bounds[0], bounds[1], bounds[1] + 1} {
			want := n >= bounds[0] && (n <= bounds[1] || strings.HasSuffix(pattern, `,}\z`))
			if got := re.Match([]byte(strings.Repeat("a", n))); got != want {
				t.Errorf("%s on %d: %v", pattern, n, got)
			}
		}
	}
	got, _ := replace(t, compile(t, `(a){1001}(b)`, rexp.Options{}), strings.Repeat("a", 1001)+"b", compile(t, `(a){1001}(b)`, rexp.Options{}).Template("<$1$2>"), false)
	if got != "<ab>" {
		t.Errorf("groups around an unrolled repetition: %q", got)
	}
}

func TestReplace_Templates(t *testing.T) {
	t.Parallel()
	re := compile(t, `(?P<first>a)(b)?`, rexp.Options{})
	for template, want := range map[string]string{
		"$1": "a", "${1}": "a", "$first": "a", "${first}": "a", "$$": "$", "$0": "a", "$1x": "", "$1é": "aé",
		"$2": "", "$9": "", "$nope": "", `\1`: `\1`, "$": "$", "${1": "${1", "$-1": "$-1", "${foo bar}": "",
		"${}": "", "$ 1": "$ 1", "x$1y$": "x", "${01}": "a", "[$1]$$1": "[a]$1", "": "", "${99999999999999999999}": "",
	} {
		if template == "x$1y$" {
			want = "x$"
		}
		if got, n := replace(t, re, "a", re.Template(template), false); got != want || n != 1 {
			t.Errorf("%q: %q (%d), want %q", template, got, n, want)
		}
	}
}

func TestReplace_EmptyMatchesAndLineEnds(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		pattern, template, text, want string
		first                         bool
		n                             int
	}{
		{`x*`, "-", "abc\n", "-a-b-c-\n-", false, 5},
		{`.*`, "X", "abc\n", "X\nX", false, 2},
		{`foo$`, "bar", "foo\n", "foo\n", false, 0},
		{`foo$`, "bar", "foo", "bar", false, 1},
		{`\s+$`, "", "a  \n", "a", false, 1},
		{`a`, "b", "aaa", "baa", true, 1},
		{`\bé`, "e", "é né é", "e né e", false, 2},
		{`\B`, "-", "éa", "é-a", false, 1},
	} {
		re := compile(t, c.pattern, rexp.Options{})
		if got, n := replace(t, re, c.text, re.Template(c.template), c.first); got != c.want || n != c.n {
			t.Errorf("%s on %q: %q (%d), want %q (%d)", c.pattern, c.text, got, n, c.want, c.n)
		}
	}
}

// More matches than are found at a time: the rest is found one by one.
func TestReplace_ManyMatchesContinueAfterABatch(t *testing.T) {
	t.Parallel()
	for _, pattern := range []string{`a`, `a|`, `(a)()()()()()()()()()()()()()()()()()()()`, `\ba|a\b|a`, `(?-u:\ba|a)`} {
		re := compile(t, pattern, rexp.Options{})
		text := strings.Repeat("aé", 80_000)
		got, _ := replace(t, re, text, re.Template("<$0>"), false)
		if want := strings.ReplaceAll(text, "a", "<a>"); strings.ReplaceAll(got, "<>", "") != want {
			t.Errorf("%s: wrong in %d bytes", pattern, len(got))
		}
	}
}

func TestLiteral_IgnoreCaseWithDollar(t *testing.T) {
	t.Parallel()
	re := compile(t, "a$B.", rexp.Options{Literal: true, IgnoreCase: true})
	if got, n := replace(t, re, "xA$b.a$bX", rexp.LiteralTemplate("$1$$"), false); got != "x$1$$a$bX" || n != 1 {
		t.Errorf("%q (%d)", got, n)
	}
	// Lower-casing would change the length of these.
	re = compile(t, "İı", rexp.Options{Literal: true, IgnoreCase: true})
	if got, _ := replace(t, re, "aİıb", rexp.LiteralTemplate("-"), false); got != "a-b" {
		t.Errorf("%q", got)
	}
}

func TestReplace_ReportsTheWritersError(t *testing.T) {
	t.Parallel()
	re := compile(t, "a", rexp.Options{})
	if _, err := re.Replace(brokenWriter{}, []byte("xax"), re.Template("b"), false); !errors.Is(err, errBroken) {
		t.Errorf("%v", err)
	}
}

var errBroken = errors.New("broken")

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errBroken }

func FuzzCompile(f *testing.F) {
	for i, c := range rustCases(f) {
		if i%20 == 0 {
			f.Add(c.pattern, c.text, c.replacement)
		}
	}
	f.Fuzz(func(t *testing.T, pattern, text, replacement string) {
		re, err := rexp.Compile(pattern, rexp.Options{})
		if err != nil {
			return
		}
		text = strings.ToValidUTF8(text, "?")
		var b bytes.Buffer
		n, err := re.Replace(&b, []byte(text), re.Template(replacement), false)
		if err != nil {
			t.Fatal(err)
		}
		if match := re.Match([]byte(text)); match != (n > 0) || match != re.MatchReader(strings.NewReader(text)) {
			t.Fatalf("%q on %q: %d matches replaced, Match says %v", pattern, text, n, match)
		}
	})
}

// What would take minutes ends when it is no longer wanted, and gives the same
// result as ever when it is.
func TestEnded_LargePatternOnALongText(t *testing.T) {
	t.Parallel()
	text := []byte(strings.Repeat("a", 200<<10) + "b")
	asked, over := 0, true
	opts := rexp.Options{Ended: func() bool { asked++; return over }}
	re, err := rexp.Compile(`a{1000}{10}b`, opts)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if re.Match(text) || asked != 1 {
		t.Errorf("matched, or asked %d times", asked)
	}
	if n, err := re.Replace(&out, text, re.Template("x"), false); n != 0 || err != nil || out.String() != string(text) {
		t.Errorf("%d replacements, %v", n, err)
	}
	over = false
	if re, err = rexp.Compile(`(?:x{900}|a)b`, opts); err != nil {
		t.Fatal(err)
	}
	out.Reset()
	n, err := re.Replace(&out, text, re.Template("x"), false)
	if !re.Match(text) || n != 1 || err != nil || out.String() != strings.Repeat("a", 200<<10-1)+"x" {
		t.Errorf("%d replacements, %v", n, err)
	}
}

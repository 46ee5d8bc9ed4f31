package krun_test

import (
	"strings"
	"testing"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/krun"
)

// Reports as a VMM might write them that its guest has taken over.
func TestRefusalOfHostileReports(t *testing.T) {
	t.Parallel()
	s := &krun.Sequence{}
	s.Watch()
	s.CreateContext()
	for report, want := range map[string]string{
		"lacking 0 0 krun_x\n":                    "krun_x",
		"lacking 2 0 krun_x\n":                    "krun_x",
		"library 0 0 \x1b[2Jcleared\a\x00 \xff\n": "load libkrun: [2Jcleared ",
		"call 1 2147483647 \n":                    "krun_create_ctx",
		"call 1 -9223372036854775808 \n":          "krun_create_ctx",
		"call 2 -22 \n":                           "krun_",
		"call 3 -22 \n":                           "its report is",
		"call -1 -22 \n":                          "its report is",
		"call 99999999999999999999 -22 \n":        "its report is",
		"call\n":                                  "its report is",
		"\n":                                      "its report is",
		"\x1b c":                                  `its report is "\x1b c"`,
		strings.Repeat("x", krun.MaxReport):       "its report is",
	} {
		err := s.Refusal([]byte(report))
		if err == nil || !strings.Contains(err.Error(), want) || strings.ContainsAny(err.Error(), "\x00\a\x1b\n") {
			t.Errorf("%q: %v, want %q", report, err, want)
		}
	}
	if err := s.Refusal(nil); err != nil {
		t.Error(err)
	}
}

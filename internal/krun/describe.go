package krun

import (
	"bytes"
	"errors"
	"strconv"
	"strings"
)

// Description is what a library can do.
type Description struct {
	// features has a bit for each Feature.
	features uint64
	// Missing are the functions of ABI 1 that are used here and not there: what came
	// after 1.17.0, or was left out of the build.
	Missing []string
}

// Has tells whether the library has a feature; false also where it does not know
// of it, and before 1.17.3, which cannot tell.
func (d Description) Has(feature Feature) bool { return d.features>>feature&1 == 1 }

// Described is the report of a child that was told to describe the library; the
// error is that of Refusal.
func (s *Sequence) Described(report []byte) (d Description, err error) {
	line, _, _ := bytes.Cut(report, []byte("\n"))
	fields := strings.Fields(string(line))
	if len(fields) < 4 || fields[0] != "described" {
		if err := s.Refusal(report); err != nil {
			return d, err
		}
		return d, errors.New("it ended without a report")
	}
	d.Missing = fields[4:]
	d.features, err = strconv.ParseUint(fields[3], 16, 64)
	return d, err
}

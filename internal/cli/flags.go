package cli

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// memoryFlag is a size in MiB, written as a number of MiB or with a unit.
type memoryFlag int

func (m *memoryFlag) String() string { return strconv.Itoa(int(*m)) }
func (m *memoryFlag) Type() string   { return "size" }

func (m *memoryFlag) Set(s string) error {
	number := strings.ToLower(s)
	for _, suffix := range []string{"ib", "b"} {
		number = strings.TrimSuffix(number, suffix)
	}
	factor := 1
	switch {
	case strings.HasSuffix(number, "m"):
		number = strings.TrimSuffix(number, "m")
	case strings.HasSuffix(number, "g"):
		number, factor = strings.TrimSuffix(number, "g"), 1024
	}
	n, err := strconv.Atoi(number)
	if err != nil || n <= 0 || n > math.MaxInt32/factor {
		return fmt.Errorf("%q is not a size: write MiB as in 512, 512m or 2g", s)
	}
	*m = memoryFlag(n * factor)
	return nil
}

// vmmFlag names what runs the VMs. The variable that stands in for the flag may
// have any value; the driver refuses it.
type vmmFlag string

func (v *vmmFlag) String() string { return string(*v) }
func (v *vmmFlag) Type() string   { return "string" }

func (v *vmmFlag) Set(s string) error {
	switch s {
	case "auto", "libkrun", "qemu":
		*v = vmmFlag(s)
		return nil
	}
	return errors.New("use auto, libkrun or qemu")
}

// durationFlag is a time, written with a unit or as a number of seconds.
type durationFlag time.Duration

// String is "0" where no time is set, which keeps it out of the help.
func (d *durationFlag) String() string {
	if *d == 0 {
		return "0"
	}
	return time.Duration(*d).String()
}

func (d *durationFlag) Type() string { return "duration" }

func (d *durationFlag) Set(s string) error {
	value, err := time.ParseDuration(s)
	if seconds, numErr := strconv.ParseUint(s, 10, 31); numErr == nil {
		value, err = time.Duration(seconds)*time.Second, nil
	}
	if err != nil || value <= 0 {
		return fmt.Errorf("%q is not a time above 0: write 30s, 5m, 1h or a number of seconds", s)
	}
	*d = durationFlag(value)
	return nil
}

// environment turns --env flags into KEY=value: a bare KEY takes the value of
// this process's environment and is left out where that has none.
func environment(flags []string, lookup func(string) string) ([]string, error) {
	var env []string
	for _, flag := range flags {
		key, _, hasValue := strings.Cut(flag, "=")
		switch {
		case key == "":
			return nil, usagef("--env %q: write KEY=value, or KEY to pass on your own", flag)
		case hasValue:
			env = append(env, flag)
		case lookup(key) != "":
			env = append(env, key+"="+lookup(key))
		}
	}
	return env, nil
}

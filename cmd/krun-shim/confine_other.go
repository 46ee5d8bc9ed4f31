//go:build !linux

package main

import (
	"errors"
	"log/slog"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/shim/libkrun"
)

// confinement is nil: Landlock is Linux's alone.
func confinement(*slog.Logger) func(*bootspec.Spec) []string { return nil }

func confine([]string) error { return errors.New(commandConfine + ": only Linux has Landlock") }

func canConfine(*slog.Logger) bool { return false }

func libkrunRuleset(*bootspec.Spec) (*libkrun.Ruleset, error) { return nil, nil }

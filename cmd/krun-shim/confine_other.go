//go:build !linux

package main

import (
	"errors"
	"log/slog"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/bootspec"
)

// confinement is nil: Landlock is Linux's alone.
func confinement(*slog.Logger) func(*bootspec.Spec) []string { return nil }

func confine([]string) error { return errors.New(commandConfine + ": only Linux has Landlock") }

func canConfine(*slog.Logger) bool { return false }

func confineLibkrun(*bootspec.Spec) error { return errors.New("only Linux has Landlock") }

// Command docs writes the reference of the functions and of their errors, from the
// schemas that are registered with the engine and from the table of codes.
//
//	go run ./build/docs -dir docs
package main

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/contract"
)

// examplesText has one example of each function; a test of package adapter runs
// them all, in their order.
//
//go:embed examples.json
var examplesText []byte

// example is a call and what it returns.
type example struct {
	Function string          `json:"function"`
	Request  json.RawMessage `json:"request"`
	Reply    json.RawMessage `json:"reply"`
}

func main() {
	dir := flag.String("dir", "docs", "where to write")
	flag.Parse()
	if err := write(*dir); err != nil {
		fmt.Fprintf(os.Stderr, "docs: %v\n", err)
		os.Exit(1)
	}
}

func write(dir string) error {
	var examples []example
	if err := json.Unmarshal(examplesText, &examples); err != nil {
		return fmt.Errorf("examples.json: %w", err)
	}
	functions, err := functionsPage(contract.Functions(), contract.Extended(), examples)
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(dir, "functions.md"), functions, 0o644),
		os.WriteFile(filepath.Join(dir, "errors.md"), errorsPage(), 0o644),
	)
}

// page is a Markdown file being written.
type page struct{ bytes.Buffer }

func (p *page) linef(format string, args ...any) { p.WriteString(fmt.Sprintf(format, args...) + "\n") }

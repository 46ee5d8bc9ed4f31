package main

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii/iiitest"
)

func (p program) serveCommand() *cobra.Command {
	var (
		host     string
		port     int
		entries  []string
		stripped bool
		verbose  bool
	)
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the engine until interrupted (the default)",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			level := slog.LevelInfo
			if verbose {
				level = slog.LevelDebug
			}
			configuration, err := readEntries(entries)
			if err != nil {
				return err
			}
			engine, err := iiitest.Start(iiitest.Options{
				Address:         net.JoinHostPort(host, strconv.Itoa(port)),
				Configuration:   configuration,
				NoConfiguration: stripped,
				Getenv:          p.getenv,
				Log:             slog.New(slog.NewTextHandler(p.stderr, &slog.HandlerOptions{Level: level})),
			})
			if err != nil {
				return err
			}
			defer engine.Close()
			if _, err := fmt.Fprintf(p.stdout, "listening on %s\n", engine.URL()); err != nil {
				return err
			}
			<-cmd.Context().Done()
			return nil
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&host, "host", "127.0.0.1", "address to listen on; there is no access control")
	flags.IntVar(&port, "port", defaultPort, "port to listen on; 0 takes a free one")
	flags.StringArrayVar(&entries, "config", nil, "ID=FILE: serve the JSON in FILE as the configuration entry ID (repeatable)")
	flags.BoolVar(&stripped, "no-configuration", false, "run without the configuration worker")
	flags.BoolVarP(&verbose, "verbose", "v", false, "log every connection")
	return cmd
}

// readEntries adds configuration entries from files to the shipped ones.
func readEntries(entries []string) (map[string]json.RawMessage, error) {
	configuration := iiitest.DefaultConfiguration()
	for _, e := range entries {
		id, file, ok := strings.Cut(e, "=")
		if !ok || id == "" {
			return nil, fmt.Errorf("--config %s: write it as ID=FILE", e)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("configuration entry %s: %w", id, err)
		}
		if !json.Valid(text) {
			return nil, fmt.Errorf("configuration entry %s: %s is not JSON", id, file)
		}
		configuration[id] = text
	}
	return configuration, nil
}

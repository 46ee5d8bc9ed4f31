package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/cleanup"
	"github.com/iii-hq/workers/sandbox-libkrun/internal/iii"
	"github.com/iii-hq/workers/sandbox-libkrun/test/nodesdk"
)

const (
	// goalCall is the goal of a call that needs no VM.
	goalCall = 1.2
	// callsPerRound of each function are made in turn, callsBefore of each do not
	// count: Node compiles what it runs often.
	callsPerRound = 100
	callsBefore   = 500
)

// calls compares calls that need no VM with those of a function of a Node worker
// that returns its payload, all one after the other through the same engine.
func (b *bench) calls(ctx context.Context, s *served, undo *cleanup.Stack) ([]row, error) {
	dir, err := nodesdk.Prepare(ctx)
	if err != nil {
		return nil, err
	}
	cmd := nodesdk.Worker(dir, s.engine.URL(), "node")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	node, err := startChild(cmd)
	if err != nil {
		return nil, err
	}
	undo.Add(func() error { return node.end(func() { _ = stdin.Close() }) })
	if err := s.await(ctx, node, "node::pull"); err != nil {
		return nil, err
	}
	functions := []string{"node::echo", prefix + "adapter::info", prefix + "list"}
	times := make([][]time.Duration, len(functions))
	ratios := make([][]float64, len(functions))
	for round := range b.runs + 1 {
		for i, function := range functions {
			n := callsPerRound
			if round == 0 {
				n = callsBefore
			}
			list, err := timeCalls(ctx, s.client, function, n)
			if err != nil {
				return nil, err
			}
			if round > 0 {
				times[i] = append(times[i], list...)
				ratios[i] = append(ratios[i], median(list)/median(times[0][len(times[0])-callsPerRound:]))
			}
		}
		b.note("calls: %d of %d rounds", round, b.runs)
	}
	var rows []row
	for i, function := range functions[1:] {
		r := newRow("call "+function[len(prefix):], 1000*median(times[i+1]), 1000*median(times[0]), "µs", goalCall,
			fmt.Sprintf("node::echo of a Node worker with the iii-sdk, through the same engine; %d of each in turn", callsPerRound))
		rows = append(rows, r.withRatio(ratios[i+1]))
	}
	return rows, nil
}

func timeCalls(ctx context.Context, client *iii.Client, function string, n int) ([]time.Duration, error) {
	var list []time.Duration
	for range n {
		begin := time.Now()
		_, err := client.Invoke(ctx, iii.Request{Function: function, Data: json.RawMessage(`{"n":1}`)})
		if err != nil {
			return nil, fmt.Errorf("%s: %w", function, err)
		}
		list = append(list, time.Since(begin))
	}
	return list, nil
}

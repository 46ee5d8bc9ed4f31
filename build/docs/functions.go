package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/contract"
)

const functionsHead = `# Functions

Made by ` + "`make generate`" + ` from the schemas that the adapter registers with the engine.

The adapter serves the functions below as ` + "`sandbox-libkrun::<name>`" + `. Under iii 0.26 or later the engine's router passes
calls of ` + "`sandbox::<name>`" + ` on to them unchanged.

    iii trigger sandbox-libkrun::run --timeout-ms 300000 \
      --json '{"image":"python","lang":"python","code":"print(6*7)"}'

Without iii, ` + "`go run ./test/cmd/engine trigger`" + ` takes the place of ` + "`iii trigger`" + `; the README tells how.

Fields of a request that are not known are ignored; a known field of the wrong type, or null where the type below does not
say so, is the error S001. Errors are in [errors.md](errors.md).

Extensions are what this adapter has beyond the contract. They are in the registered schemas only where its environment
has III_SANDBOX_EXTENSIONS=1.

The examples, a request and its reply for each function, are one session in the order of this page. A test runs them.
`

// functionsPage is docs/functions.md, in the order of the examples.
func functionsPage(functions, extended []contract.Function, examples []example) ([]byte, error) {
	if len(examples) != len(functions) {
		return nil, fmt.Errorf("%d functions have %d examples: each needs one", len(functions), len(examples))
	}
	byName := map[string]documented{}
	for i, f := range functions {
		byName[f.Name] = documented{Function: f, extended: extended[i]}
	}
	var p page
	p.linef("%s", functionsHead)
	for _, e := range examples {
		p.linef("* [%s](#%s)", e.Function, anchor(e.Function))
	}
	for _, e := range examples {
		f, ok := byName[e.Function]
		if !ok {
			return nil, fmt.Errorf("%s is no function", e.Function)
		}
		delete(byName, e.Function)
		if err := p.function(f, e); err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name, err)
		}
	}
	return p.Bytes(), nil
}

// documented is a function with the same one's schemas with extensions.
type documented struct {
	contract.Function
	extended contract.Function
}

// anchor is what Markdown makes of a heading.
func anchor(heading string) string { return strings.ReplaceAll(heading, ":", "") }

func (p *page) function(f documented, e example) error {
	p.linef("\n## %s\n\n%s", f.Name, f.Description)
	var request, reply, extendedRequest, extendedReply schema
	for text, into := range map[*json.RawMessage]*schema{
		&f.Request: &request, &f.Response: &reply, &f.extended.Request: &extendedRequest, &f.extended.Response: &extendedReply,
	} {
		if err := json.Unmarshal(*text, into); err != nil {
			return err
		}
	}
	p.fields("Request", request, true)
	p.fields("Reply", reply, false)
	inRequest, inReply := extendedRequest.without(request), extendedReply.without(reply)
	if inRequest || inReply {
		p.linef("\nExtensions:")
		p.fields("Request", extendedRequest, true)
		p.fields("Reply", extendedReply, false)
	}
	p.linef("\n```json\n%s\n```\n\n```json\n%s\n```", indented(e.Request), indented(e.Reply))
	return nil
}

// schema is the part of a JSON schema that the contract uses.
type schema struct {
	Description string            `json:"description"`
	Type        any               `json:"type"`
	Format      string            `json:"format"`
	Default     json.RawMessage   `json:"default"`
	Enum        []string          `json:"enum"`
	Ref         string            `json:"$ref"`
	AllOf       []schema          `json:"allOf"`
	AnyOf       []schema          `json:"anyOf"`
	OneOf       []schema          `json:"oneOf"`
	Items       *schema           `json:"items"`
	Properties  map[string]schema `json:"properties"`
	Additional  *schema           `json:"additionalProperties"`
	Required    []string          `json:"required"`
	Definitions map[string]schema `json:"definitions"`
}

// fields is a table of an object's fields, those of objects within it behind it.
func (p *page) fields(title string, root schema, request bool) {
	if len(root.Properties) == 0 {
		p.linef("\n%s: no fields.", title)
		return
	}
	if request {
		p.linef("\n| request | type | default | |\n|---|---|---|---|")
	} else {
		p.linef("\n| reply | type | |\n|---|---|---|")
	}
	p.rows("", root, root.Definitions, request)
}

// without leaves out the fields that other has, and tells whether any is left.
func (s schema) without(other schema) bool {
	maps.DeleteFunc(s.Properties, func(name string, _ schema) bool {
		_, has := other.Properties[name]
		return has
	})
	return len(s.Properties) > 0
}

func (p *page) rows(prefix string, object schema, definitions map[string]schema, request bool) {
	names := slices.Sorted(maps.Keys(object.Properties))
	slices.SortStableFunc(names, func(a, b string) int {
		return boolOrder(slices.Contains(object.Required, b)) - boolOrder(slices.Contains(object.Required, a))
	})
	for _, name := range names {
		field := object.Properties[name]
		typ, inner := field.describe(definitions)
		if request {
			value := "`" + string(field.Default) + "`"
			switch {
			case slices.Contains(object.Required, name):
				value = "required"
			case field.Default == nil:
				value = ""
			}
			p.linef("| `%s%s` | %s | %s | %s |", prefix, name, typ, value, cell(field.Description))
		} else {
			p.linef("| `%s%s` | %s | %s |", prefix, name, typ, cell(field.Description))
		}
		if inner != nil {
			at := prefix + name + "."
			if strings.HasPrefix(typ, "array") {
				at = prefix + name + "[]."
			}
			p.rows(at, *inner, definitions, request)
		}
	}
}

func boolOrder(b bool) int {
	if b {
		return 1
	}
	return 0
}

// describe names a type in words and returns the object that it refers to, if any.
func (s schema) describe(definitions map[string]schema) (words string, object *schema) {
	switch {
	case s.Ref != "":
		return definitions[strings.TrimPrefix(s.Ref, "#/definitions/")].describe(definitions)
	case len(s.AllOf) == 1:
		return s.AllOf[0].describe(definitions)
	case len(s.Enum) > 0:
		return "`\"" + strings.Join(s.Enum, "\"`, `\"") + "\"`", nil
	case s.Items != nil:
		item, inner := s.Items.describe(definitions)
		if inner != nil {
			item = "objects"
		}
		return "array of " + item, inner
	case s.Additional != nil:
		value, _ := s.Additional.describe(definitions)
		return "object of " + value, nil
	case len(s.Properties) > 0:
		return "object", &s
	}
	if choices := append(s.AnyOf, s.OneOf...); len(choices) > 0 {
		var all []string
		for _, choice := range choices {
			one, inner := choice.describe(definitions)
			if inner != nil {
				object = inner
			}
			all = append(all, one)
		}
		return strings.Join(all, " or "), object
	}
	types, ok := s.Type.([]any)
	if !ok {
		types = []any{s.Type}
	}
	for i, t := range types {
		if i > 0 {
			words += " or "
		}
		if t == "integer" && s.Format != "" {
			t = s.Format
		}
		words += fmt.Sprint(t)
	}
	return words, nil
}

func indented(text json.RawMessage) string {
	var b bytes.Buffer
	if err := json.Indent(&b, text, "", "  "); err != nil {
		return string(text)
	}
	return b.String()
}

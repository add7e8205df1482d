package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dpserve/dpserve/app"
	"github.com/dpserve/dpserve/engine/attach"
	"github.com/dpserve/dpserve/internal/problem"
)

// Bounds of probing the engines of --attach.
const (
	probeTimeout  = 10 * time.Second
	probesAtOnce  = 8
	maxNameLength = 63 // of a DNS label
)

// attachFile probes running engines and writes the app.yaml that puts one endpoint in front of them. All engines must serve
// the first one's model; names that all of them serve besides become aliases.
func attachFile(ctx context.Context, urls []string) ([]byte, error) {
	engines := make([]string, len(urls))
	for i, u := range urls {
		var err error
		if engines[i], err = engineURL("up", "--attach", u); err != nil {
			return nil, err
		}
	}
	found, err := probeAll(ctx, engines)
	if err != nil {
		return nil, err
	}
	names, err := commonModels(found)
	if err != nil {
		return nil, err
	}
	return writeAttach(found, names), nil
}

// engineURL checks a URL that somebody typed and brings it to scheme://host:port. Copied URLs often end in /v1, which is
// where OpenAI clients begin.
func engineURL(cmd, what, text string) (string, error) {
	s := strings.TrimSuffix(strings.TrimSuffix(strings.TrimRight(strings.TrimSpace(text), "/"), "/v1"), "/")
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.Path != "" || u.RawQuery != "" || u.User != nil {
		return "", usageError(cmd, "%s %q: wanted http://HOST:PORT", what, text)
	}
	return s, nil
}

func probeAll(ctx context.Context, urls []string) ([]attach.Found, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	found := make([]attach.Found, len(urls))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(probesAtOnce)
	for i, u := range urls {
		g.Go(func() (err error) {
			found[i], err = attach.Probe(ctx, u, nil)
			return err
		})
	}
	return found, g.Wait()
}

// commonModels are the names every engine serves, the first engine's order; the first one is the model's id.
func commonModels(found []attach.Found) ([]string, error) {
	var out []string
	for _, m := range found[0].Models {
		if !slices.ContainsFunc(found, func(f attach.Found) bool { return !slices.Contains(f.Models, m) }) {
			out = append(out, m)
		}
	}
	if len(out) > 0 {
		return out, nil
	}
	err := problem.New(problem.InvalidArgument, "the engines serve different models")
	for _, f := range found {
		err.Details = append(err.Details, f.URL+" serves "+strings.Join(f.Models, ", "))
	}
	return nil, err.WithHint("attach engines of one model, or write an app.yaml with one application per model")
}

// writeAttach writes the shortest file that says it.
func writeAttach(found []attach.Found, models []string) []byte {
	var b strings.Builder
	family := found[0].Family
	for _, f := range found {
		if f.Family != family {
			family = attach.OpenAI // nothing but the API is assumed of a mixed crowd
		}
	}
	fmt.Fprintf(&b, "applications:\n  - name: %s\n    model:\n      id: %s\n", label(models[0]), quote(models[0]))
	if len(models) > 1 {
		b.WriteString("      aliases:\n")
		for _, m := range models[1:] {
			fmt.Fprintf(&b, "        - %s\n", quote(m))
		}
	}
	fmt.Fprintf(&b, "    engine:\n      kind: %s\n      family: %s\n      ranks:\n", app.KindAttach, family)
	for _, f := range found {
		fmt.Fprintf(&b, "        - url: %s\n", quote(f.URL))
	}
	return []byte(b.String())
}

// quote writes a YAML string; JSON's form is one.
func quote(s string) string {
	text, _ := json.Marshal(s) // a string always marshals
	return string(text)
}

// label makes a DNS label of a model's id: its last part, in lower case, with dashes.
func label(model string) string {
	name := strings.ToLower(model[strings.LastIndexByte(model, '/')+1:])
	name = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, name)
	name = strings.Trim(name[:min(len(name), maxNameLength)], "-")
	if name == "" || name[0] >= '0' && name[0] <= '9' {
		return strings.TrimSuffix(("attached-" + name)[:min(len("attached-"+name), maxNameLength)], "-")
	}
	return name
}

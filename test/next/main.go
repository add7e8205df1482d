// Command next writes the overlay with which `go build -overlay` builds a next version of dpserve: this one
// with one more kind of command, field of the state, field of a node's record and kind of event. The tests of
// upgrades run it beside this version.
package main

import (
	"encoding/json"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"
)

// edit replaces a text that is once in a file of the product.
type edit struct{ file, old, text string }

func edits() []edit {
	const (
		command = "internal/state/command.go"
		nodes   = "internal/server/node.go"
	)
	return []edit{
		{command, "const Level = 1\n", "const Level = 2\n"},
		{
			command, "func (c *Command) Level() int { return 1 }",
			"func (c *Command) Level() int { return c.next() }",
		},
		{
			command, "func (n Node) ReadableAt(int) Node { return n }",
			"func (n Node) ReadableAt(level int) Node { return n.withoutNext(level) }",
		},
		after(command, "`json:\"rotate_key,omitempty\"`\n", "Mark *Mark `json:\"mark,omitempty\"`\n"),
		after("internal/state/node.go", "`json:\"offer\"`\n", "Colour string `json:\"colour,omitempty\"`\n"),
		after("internal/state/state.go", "	Level int `json:\"level,omitempty\"`\n",
			"Marked string `json:\"marked,omitempty\"`\n"),
		after("internal/state/apply.go", "		return s.rotateGossipKey(c.RotateGossipKey)\n",
			"case c.Mark != nil:\n s.Marked = c.Mark.Text\n return Result{}, nil\n"),
		after(nodes, "	out.Resources = withDevices(n.resources, n.devices)\n", "addNextFields(n, &out)\n"),
		after(nodes, "		n.life.loops.Go(func() { n.upkeep.Run(n.life.ctx) })\n",
			"n.life.loops.Go(func() { probeNext(n.life.ctx, n) })\n"),
		{"internal/server/leading.go", "n.leader.Renew(ctx, r)", "n.leader.Renew(ctx, withNextEvents(r))"},
	}
}

// after adds text behind a line.
func after(file, line, text string) edit { return edit{file, line, line + text} }

// added are files of testdata and their places in the product.
var added = map[string]string{
	"state.go.txt": "internal/state/next.go", "state_test.go.txt": "internal/state/next_test.go",
	"server.go.txt": "internal/server/next.go",
}

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: go run ./test/next FOLDER: writes the overlay into a folder and prints its path")
	}
	path, err := write(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(path)
}

// write makes the overlay in a folder. The working folder is the repository's.
func write(dir string) (path string, err error) {
	changed := map[string]string{}
	for _, e := range edits() {
		if changed[e.file] == "" {
			data, err := os.ReadFile(e.file)
			if err != nil {
				return "", err
			}
			changed[e.file] = string(data)
		}
		if n := strings.Count(changed[e.file], e.old); n != 1 {
			return "", fmt.Errorf("%s has %q %d times, not once", e.file, e.old, n)
		}
		changed[e.file] = strings.Replace(changed[e.file], e.old, e.text, 1)
	}
	root, err := os.Getwd()
	if err != nil {
		return "", err
	}
	var overlay struct{ Replace map[string]string }
	overlay.Replace = map[string]string{}
	for file, text := range changed {
		to := filepath.Join(dir, strings.ReplaceAll(file, "/", "_"))
		overlay.Replace[filepath.Join(root, file)] = to
		if err := os.WriteFile(to, []byte(text), 0o600); err != nil {
			return "", err
		}
	}
	for from, file := range added {
		overlay.Replace[filepath.Join(root, file)] = filepath.Join(root, "test/next/testdata", from)
	}
	data, err := json.Marshal(overlay)
	if err != nil {
		return "", err
	}
	path = filepath.Join(dir, "overlay.json")
	return path, os.WriteFile(path, data, 0o600)
}

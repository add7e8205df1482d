package api

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// rayDocument is the name of a body of PUT in faults.
const rayDocument = "applications.json"

// readRayDocument reads the body of a PUT. An entry without import_path is an application in dpserve's own
// form, and so are the args of an entry with rayImportPath. Any other entry is one of Ray Serve, with the
// keys of the document around it. notes has for each application the keys without effect.
func readRayDocument(data []byte) (file *app.File, notes map[string][]string, err error) {
	var root any
	if err := json.Unmarshal(data, &root); err != nil {
		return nil, nil, problem.New(problem.InvalidArgument, "the body is not JSON: %w", err).
			WithHint("send one JSON object; `serve deploy` makes it of a YAML file")
	}
	var check rayCheck
	document, entries := check.document(root)
	if err := check.err(); err != nil {
		return nil, nil, err
	}
	file, notes = &app.File{}, map[string][]string{}
	for i, entry := range entries {
		part := map[string]any{}
		switch path, isRay := entry["import_path"]; {
		case path == rayImportPath:
			entry = ownEntry(entry)
		case isRay:
			part = maps.Clone(document)
		}
		part["applications"] = []any{entry}
		text, err := json.Marshal(part)
		if err != nil {
			return nil, nil, err
		}
		one, warnings, err := app.Parse(app.Default(), rayDocument, text)
		if err != nil {
			check.parseError(i, err)
			continue
		}
		for _, a := range one.Applications {
			file.Applications = append(file.Applications, a)
			for _, w := range warnings {
				notes[a.Name] = append(notes[a.Name], pathOfEntry(w.Path, i)+": "+app.Fault(w).Describe())
			}
		}
	}
	return file, notes, check.err()
}

// pathOfEntry is a path in the whole document; path is one in a document with that entry alone.
func pathOfEntry(path string, i int) string {
	return strings.Replace(path, "applications[0]", fmt.Sprintf("applications[%d]", i), 1)
}

// ownEntry returns the application that is in an entry's args. The entry's name and route_prefix are those of
// the application.
func ownEntry(entry map[string]any) map[string]any {
	args, _ := entry["args"].(map[string]any)
	out := maps.Clone(args)
	if out == nil {
		out = map[string]any{}
	}
	for _, key := range []string{"name", "route_prefix"} {
		if v, ok := entry[key]; ok {
			out[key] = v
		}
	}
	return out
}

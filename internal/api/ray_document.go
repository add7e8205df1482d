package api

import (
	"encoding/json"
	"maps"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// rayDocument is the name of a body of PUT in faults.
const rayDocument = "applications.json"

// ConvertRay reads a Ray Serve document and returns its applications in dpserve's form, with a note of each
// key that has no effect. The error is app.Faults.
type ConvertRay func(file string, text []byte) (*app.File, []app.Warning, error)

// readRayDocument reads the body of a PUT. An entry without import_path is an application in dpserve's own
// form, and so are the args of an entry with rayImportPath. All other entries go through convert, with the
// keys of the document around them.
func readRayDocument(data []byte, convert ConvertRay) (*app.File, []app.Warning, error) {
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
	own, foreign := []any{}, []any{}
	for _, entry := range entries {
		switch path, isRay := entry["import_path"]; {
		case !isRay:
			own = append(own, entry)
		case path == rayImportPath:
			own = append(own, ownEntry(entry))
		case convert == nil:
			return nil, nil, errNoPython(entry)
		default:
			foreign = append(foreign, entry)
		}
	}
	out := &app.File{}
	notes, err := addEntries(out, nil, own, parseOwn)
	if err != nil {
		return nil, nil, err
	}
	more, err := addEntries(out, document, foreign, convert)
	return out, append(notes, more...), err
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

func errNoPython(entry map[string]any) error {
	return problem.New(problem.InvalidArgument,
		"application %q has import_path %q, and dpserve runs no Python", entry["name"], entry["import_path"]).
		WithHint("write import_path: %s, and under args the application as docs/app-yaml.md shows",
			rayImportPath)
}

func parseOwn(file string, text []byte) (*app.File, []app.Warning, error) {
	return app.Parse(app.Default(), file, text)
}

// addEntries reads entries in a document with the given other keys and adds their applications to out.
func addEntries(
	out *app.File, document map[string]any, entries []any, read ConvertRay,
) ([]app.Warning, error) {
	if len(entries) == 0 {
		return nil, nil
	}
	part := maps.Clone(document)
	if part == nil {
		part = map[string]any{}
	}
	part["applications"] = entries
	text, err := json.Marshal(part)
	if err != nil {
		return nil, err
	}
	file, notes, err := read(rayDocument, text)
	if err != nil {
		return nil, err
	}
	out.Applications = append(out.Applications, file.Applications...)
	return notes, nil
}

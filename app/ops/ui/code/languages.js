// Languages that code is highlighted in: their words, comments and strings.

const words = (text) => new Set(text.split(" "));
const C_COMMENTS = { line: ["//"], blocks: [["/*", "*/", "comment"]] };
const QUOTES = ['"', "'"];

const C_WORDS =
  "if else for while do switch case default break continue return goto sizeof typedef struct union enum static const " +
  "extern inline volatile register class public private protected virtual override final new delete this template " +
  "typename namespace using try catch throw operator friend explicit constexpr consteval auto decltype noexcept " +
  "static_assert concept requires co_await co_return co_yield __global__ __device__ __host__ __shared__ __restrict__";
const C_TYPES =
  "void bool char short int long float double unsigned signed size_t int8_t int16_t int32_t int64_t uint8_t uint16_t " +
  "uint32_t uint64_t half __half __nv_bfloat16 string vector";
const JAVA_WORDS =
  "abstract assert break case catch class const continue default do else enum extends final finally for goto if " +
  "implements import instanceof interface native new package private protected public record return sealed static " +
  "super switch synchronized this throw throws transient try var volatile while yield using namespace async await " +
  "foreach in is out ref get set fun val when object companion override open data internal lateinit suspend typealias " +
  "func let guard struct protocol extension init self where";
const JS_WORDS =
  "async await break case catch class const continue debugger default delete do else export extends finally for from " +
  "function get if import in instanceof let new of return set static super switch this throw try typeof var void " +
  "while with yield as declare enum implements interface keyof namespace private protected public readonly type abstract";
const CONSTANTS = "true false null undefined NaN Infinity nullptr nil NULL None True False";

const PYTHON = {
  line: ["#"],
  blocks: [['"""', '"""', "string"], ["'''", "'''", "string"]],
  quotes: QUOTES,
  keywords: words(
    "and as assert async await break case class continue def del elif else except finally for from global if import in " +
      "is lambda match nonlocal not or pass raise return try while with yield"
  ),
  types: words("int float str bool bytes list dict set tuple object type range len print super self cls"),
  extra: [["meta", "@[\\w.]+"]],
};
const JAVASCRIPT = {
  ...C_COMMENTS,
  blocks: [...C_COMMENTS.blocks, ["`", "`", "string"]],
  quotes: QUOTES,
  keywords: words(JS_WORDS),
  types: words("string number boolean any unknown never object symbol bigint Array Map Set Promise Object console"),
};
const C = { ...C_COMMENTS, quotes: QUOTES, keywords: words(C_WORDS), types: words(C_TYPES), extra: [["meta", "^\\s*#\\s*\\w+"]] };
const JAVA = {
  ...C_COMMENTS,
  quotes: QUOTES,
  keywords: words(JAVA_WORDS),
  types: words("void boolean byte char short int long float double String Integer List Map Set Object Int Bool Double Any Unit"),
  extra: [["meta", "@\\w+"]],
};
const GO = {
  ...C_COMMENTS,
  blocks: [...C_COMMENTS.blocks, ["`", "`", "string"]],
  quotes: QUOTES,
  keywords: words(
    "break case chan const continue default defer else fallthrough for func go goto if import interface map package " +
      "range return select struct switch type var"
  ),
  types: words("bool byte error float32 float64 int int8 int16 int32 int64 rune string uint uint8 uint32 uint64 any"),
};
const RUST = {
  ...C_COMMENTS,
  quotes: ['"'],
  keywords: words(
    "as async await break const continue crate dyn else enum extern fn for if impl in let loop match mod move mut pub " +
      "ref return self Self static struct super trait type unsafe use where while"
  ),
  types: words("bool char f32 f64 i8 i16 i32 i64 i128 isize str u8 u16 u32 u64 u128 usize String Vec Option Result Box Some Ok Err"),
  extra: [["meta", "#!?\\[[^\\]]*\\]"], ["string", "'(?:\\\\.|[^\\\\'])'"], ["type", "'\\w+"], ["function", "\\w+!"]],
};
const SHELL = {
  line: ["#"],
  quotes: QUOTES,
  keywords: words(
    "if then else elif fi for while until do done case esac in function return exit export local readonly set unset " +
      "source alias trap sudo FROM RUN CMD COPY ENV WORKDIR EXPOSE ENTRYPOINT ARG"
  ),
  types: words("echo cd ls cat grep sed awk curl git make pip python python3 npm docker kubectl mkdir rm cp mv chmod tessera"),
  extra: [["type", "\\$\\{?\\w+\\}?"], ["meta", "(?<=\\s)--?[A-Za-z][\\w-]*"]],
};
const SQL_WORDS =
  "select from where insert into values update set delete create table drop alter add index view join inner left right " +
  "outer full cross on as and or not in is like between group by order having limit offset union all distinct case when " +
  "then else end with recursive primary key foreign references default unique begin commit rollback exists asc desc over " +
  "partition returning";
const SQL = {
  line: ["--"],
  blocks: [["/*", "*/", "comment"]],
  quotes: QUOTES,
  keywords: words(`${SQL_WORDS} ${SQL_WORDS.toUpperCase()}`),
  types: words("int integer bigint text varchar char boolean date timestamp numeric real INT INTEGER TEXT VARCHAR BOOLEAN DATE"),
};
const JSON_LANGUAGE = { ...C_COMMENTS, quotes: ['"'], extra: [["function", '"(?:[^"\\\\]|\\\\.)*"(?=\\s*:)']] };
const YAML = {
  line: ["#"],
  quotes: QUOTES,
  keywords: words("yes no on off"),
  extra: [["function", "[\\w.-]+(?=\\s*[:=](?:\\s|$))"], ["meta", "^\\s*\\[[^\\]]*\\]"]],
};
const MARKUP = {
  line: [],
  blocks: [["<!--", "-->", "comment"]],
  quotes: QUOTES,
  extra: [["keyword", "</?[\\w:-]+|/?>"], ["function", "[\\w:-]+(?==)"], ["meta", "&\\w+;"]],
};
const CSS = {
  line: [],
  blocks: [["/*", "*/", "comment"]],
  quotes: QUOTES,
  extra: [["keyword", "@[\\w-]+"], ["function", "[\\w-]+(?=\\s*:)"], ["type", "[.#][A-Za-z][\\w-]*"], ["number", "#[0-9a-fA-F]{3,8}"]],
};
const RUBY = {
  line: ["#"],
  quotes: QUOTES,
  keywords: words(
    "alias and begin break case class def do else elsif end ensure for if in module next nil not or redo rescue retry " +
      "return self super then undef unless until when while yield require local function repeat echo foreach public " +
      "private protected use namespace"
  ),
  types: words("puts print attr_accessor attr_reader"),
  extra: [["type", "[@$]\\w+"], ["string", ":\\w+"]],
};
const LUA = { ...RUBY, line: ["--"], blocks: [["--[[", "]]", "comment"]], extra: [] };
const DIFF = { line: [], quotes: [], extra: [["inserted", "^\\+.*"], ["deleted", "^-.*"], ["meta", "^@@.*|^(?:diff|index) .*"]] };

const NAMES = new Map([
  [PYTHON, "python py py3 python3 pycon ipython"],
  [JAVASCRIPT, "javascript js jsx mjs typescript ts tsx node"],
  [C, "c h cpp c++ cc hpp cuda cu cuh objective-c glsl hlsl"],
  [JAVA, "java kotlin kt csharp cs c# swift scala dart"],
  [GO, "go golang"],
  [RUST, "rust rs"],
  [SHELL, "bash sh shell zsh console fish dockerfile docker makefile make"],
  [SQL, "sql postgresql mysql sqlite"],
  [JSON_LANGUAGE, "json jsonc json5 jsonl"],
  [YAML, "yaml yml toml ini conf properties env"],
  [MARKUP, "html xml svg xhtml vue"],
  [CSS, "css scss less"],
  [RUBY, "ruby rb php perl"],
  [LUA, "lua"],
  [DIFF, "diff patch"],
]);
const LANGUAGES = new Map();
for (const [language, names] of NAMES) for (const name of names.split(" ")) LANGUAGES.set(name, language);

export const constants = words(CONSTANTS);

/** The language of a code block's name; undefined if it is none of them. */
export function languageNamed(name) {
  return LANGUAGES.get(name.toLowerCase());
}
